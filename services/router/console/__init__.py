"""Shows the cluster and its requests live on a page, from the router's own state."""

"""Has the router's side of its workers: sessions, messages, drains."""

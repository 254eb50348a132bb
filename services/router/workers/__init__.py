"""Has the router's side of its workers: registrations, sessions, drains, and the operators' view of them."""

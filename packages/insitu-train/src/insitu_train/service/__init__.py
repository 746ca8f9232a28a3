"""Training and sampling at a service that speaks the Tinker API."""

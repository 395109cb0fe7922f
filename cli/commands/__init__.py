"""What each command does; `app` has their options."""

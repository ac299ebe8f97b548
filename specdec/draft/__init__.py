"""What drafts for a target, how long its proposals get, and what that costs on this machine."""

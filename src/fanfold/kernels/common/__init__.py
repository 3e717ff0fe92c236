"""What two kernel folders use unchanged."""

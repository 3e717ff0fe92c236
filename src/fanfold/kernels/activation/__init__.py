"""What happens between gate_up and down."""

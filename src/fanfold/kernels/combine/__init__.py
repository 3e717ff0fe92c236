"""The weighted sum over a token's experts."""

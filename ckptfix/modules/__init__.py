"""What works on live models: building them, loading into them, and measuring their statistics."""

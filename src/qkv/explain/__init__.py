"""What a model attends to: recorded weights, and a page to read them."""

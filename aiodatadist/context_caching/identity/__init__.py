"""Who a caller is, and what a block is called."""

"""`unicron simulate`: policies compared on scenarios and recorded logs."""

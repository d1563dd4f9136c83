"""What a sandbox may reach: an HTTP proxy with an allow-list, and a package index that ends at a day."""

"""One file a page; each reads like a description of the page."""

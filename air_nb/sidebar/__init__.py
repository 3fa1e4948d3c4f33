"""The panel beside the notebook, kernel side: what is sent to a page, and what a page may ask for."""

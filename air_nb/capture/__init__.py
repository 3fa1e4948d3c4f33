"""From the text of a cell to what its ranks need: the names it reads, frozen, or why not."""

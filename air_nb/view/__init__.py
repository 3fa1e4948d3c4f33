"""What the ranks made becomes cell output: ``events -> CellModel -> actions -> Drawer``.

``cell.CellView`` is the way in. Everything but ``draw`` is pure; nothing here owns a thread: the thread that waits for
the run draws, so that output lands in the cell that launched it.
"""

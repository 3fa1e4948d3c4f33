"""The warm launcher process of a kernel, the node agent in it, and the forkserver that ranks come from."""

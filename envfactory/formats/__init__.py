"""Tasks and trajectories in other people's formats, both ways. One file a format; `registry` lists them."""

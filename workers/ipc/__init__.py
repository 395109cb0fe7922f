"""Communication of an agent, its zygote and its ranks: pipes and a page of shared memory.

Read `pipe_protocol`, then `progress_page`. Imports `diagnosis` and `host`.
"""

"""T(t, x): what a task achieves on x slots, and what a change costs.

Read `table`, `step_time` (the analytical model), `layout_search`. `memory` says what fits;
`calibration` sets the level from measured steps. Pure. Imports `state`.
"""

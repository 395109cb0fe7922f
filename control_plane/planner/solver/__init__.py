"""The solver: an exact multiple-choice knapsack in integers.

Read `candidates`, `knapsack` (the bound) and `core`. Pure; imports numpy and nothing of ours.
"""

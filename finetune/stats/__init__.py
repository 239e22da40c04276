"""Statistics of finished runs: systems, estimates, tests, calibration, ensembles."""

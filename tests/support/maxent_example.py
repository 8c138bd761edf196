"""The worked example of MaxEnt-GRPO: two prompts with four answers each, tau .3, beta .1, T_q 1,
epsilon 1e-6. Computed by other code in float64."""

import numpy as np

TAU, BETA = 0.3, 0.1
U = np.array([1, 0, 0, 1, 0, 0, 0.5, 1])
"""Utilities."""
N = np.array([10, 20, 5, 15, 8, 4, 12, 6])
"""Action tokens."""
R = np.array([-0.8, -1.2, -0.5, -1.0, -0.6, -0.9, -0.7, -1.1])
"""Mean log-probabilities under the reference."""
L = np.array([-0.9, -1.1, -0.7, -1.0, -0.5, -1.0, -0.8, -0.9])
"""The same under the policy."""
B = np.array([-0.95, -1.05, -0.72, -1.0, -0.55, -0.95, -0.8, -1.0])
"""The same under the sampler."""
Q = np.array([0.36552883, 0.13447117, 0.13447117, 0.36552883, 0.15706014, 0.15706014, 0.25894774, 0.42693199])
W = np.array([0.47304069, 0.03513484, 0.04185424, 0.44997023, 0.06217825, 0.05768547, 0.21166378, 0.66847250])
W_SHARED = np.array([0.46727398, 0.03513484, 0.04185424, 0.45573694, 0.06217825, 0.05768547, 0.19600705, 0.68412923])
"""Shared among the best, exponent .5."""
W_SUMMED = np.array([0.66669614, 0.00100235, 0.21644709, 0.11585442, 0.08667960, 0.11700522, 0.12300343, 0.67331176])
"""With sums of reference log-probabilities."""
W_BY_TOKENS = np.array([0.70126425, 0.00210864, 0.11383492, 0.18279218, 0.10384880, 0.07009061, 0.22105130, 0.60500930])
"""Those, multiplied by the token counts and normalised."""
CENTRED = np.array([0.89216277, -0.85946065, -0.83258303, 0.79988091, -0.75128699, -0.76925812, -0.15334489, 1.67389000])
"""4 (w - 1/4)."""
TEMPERED = np.array([0.35686511, -0.34378426, -0.33303321, 0.31995236, -0.30051479, -0.30770325, -0.06133796, 0.66955600])
"""4 (tau + beta) (w - 1/4)."""
GRADIENT = np.array([-0.23783498, -0.01518835, -0.02231089, -0.22498511, -0.03013750, -0.02936859, -0.10740945, -0.33287673])
"""dL/dl of the likelihood form with the KL of sequences."""

"""`rollouts.training`: training written as plain loops over samples, a rollout manager and a
backend. `import ludic.rollouts.alias` also makes it available under the name `rollouts`."""

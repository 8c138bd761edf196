"""The task of pictures with a reward that almost never ties, so that every step of a run has a
gradient."""

from ludic.tasks.shapes import Shapes, ShapesEnv


class GradedShapesEnv(ShapesEnv):
    def env_step(self, action):
        outcome = super().env_step(action)
        outcome.reward = sum(map(ord, action)) % 256 / 256
        return outcome


class GradedShapes(Shapes):
    sees_cut_off_answers = True  # it never learns to end them in so few steps

    def make_env(self, episode):
        return GradedShapesEnv(episode)


SETTINGS = [
    *("recipe=shapes", "task.kind=graded_shapes:GradedShapes", "task.args={num_heldout: 3}", "threads=1", "warmup.steps=3"),
    *("warmup.batch_size=4", "steps=5", "rollout.prompts=2", "rollout.group_size=4", "rollout.log_every=1"),
    *("evaluation.prompts=3", "network.hidden_size=16", "network.num_heads=2", "network.intermediate_size=16"),
]
"""Settings of a run of five steps, which takes a few seconds."""

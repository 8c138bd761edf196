from ludic.envs.adapters.gymnasium import GymnasiumEnv as GymnasiumEnv
from ludic.envs.adapters.openenv import OpenEnvEnv as OpenEnvEnv
from ludic.envs.adapters.textarena import TextArenaEnv as TextArenaEnv
from ludic.envs.adapters.verifiers import VerifiersEnv as VerifiersEnv
from ludic.envs.adapters.verifiers_rollouts import rollout_from_trace as rollout_from_trace

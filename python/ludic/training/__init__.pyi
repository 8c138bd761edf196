from ludic.errors import RequestsExhausted as RequestsExhausted
from ludic.event_loop import TrainFuture as TrainFuture
from ludic.models.lora import (
    LoraSettings as LoraSettings,
    apply_lora as apply_lora,
    find_target_modules as find_target_modules,
)
from ludic.training.algorithm import (
    RLAlgorithm as RLAlgorithm,
    compose_preprocess as compose_preprocess,
    drop_zero_weight_samples as drop_zero_weight_samples,
    filter_zero_variance_groups as filter_zero_variance_groups,
    validate_actor_logps as validate_actor_logps,
)
from ludic.training.backend.protocol import TrainingBackend as TrainingBackend
from ludic.training.backend.torch import TorchBackend as TorchBackend
from ludic.training.batching.offline import (
    OfflineBatchSource as OfflineBatchSource,
    make_chat_template_step_to_item as make_chat_template_step_to_item,
)
from ludic.training.batching.overlapped import OverlappedSource as OverlappedSource
from ludic.training.batching.packing import (
    MicroBatch as MicroBatch,
    collate_micro_batches as collate_micro_batches,
    collate_saw_items as collate_saw_items,
    split_items_by_token_budget as split_items_by_token_budget,
)
from ludic.training.batching.pair_batches import preference_batches as preference_batches
from ludic.training.batching.pipeline import (
    PipelineBatchSource as PipelineBatchSource,
    run_pipeline_actor as run_pipeline_actor,
)
from ludic.training.batching.shared_batches import GatheredBatches as GatheredBatches, SharedBatches as SharedBatches
from ludic.training.batching.source import RolloutBatchSource as RolloutBatchSource
from ludic.training.callbacks import (
    Callback as Callback,
    CompletionTable as CompletionTable,
    KeepBest as KeepBest,
    OffPolicyGuard as OffPolicyGuard,
    PushToHub as PushToHub,
    StopOnMetric as StopOnMetric,
    TrainingEvent as TrainingEvent,
)
from ludic.training.checkpoint import CheckpointConfig as CheckpointConfig, CheckpointManager as CheckpointManager
from ludic.training.classification_metrics import PreferenceMetrics as PreferenceMetrics
from ludic.training.coefficients import Coefficient as Coefficient
from ludic.training.config import TrainerConfig as TrainerConfig
from ludic.training.credit_assignment import (
    BatchNormalizedReturn as BatchNormalizedReturn,
    BranchReturn as BranchReturn,
    CombineMode as CombineMode,
    ConstantCredit as ConstantCredit,
    EpisodicReturn as EpisodicReturn,
    GroupNormalizedReturn as GroupNormalizedReturn,
    HybridNormalizedReturn as HybridNormalizedReturn,
    MonteCarloReturn as MonteCarloReturn,
    OverlongPenalty as OverlongPenalty,
    PerStepReward as PerStepReward,
    RewardModelCreditAssigner as RewardModelCreditAssigner,
)
from ludic.training.critic import as_value_model as as_value_model
from ludic.training.distillation import (
    Distillation as Distillation,
    Teacher as Teacher,
    Teachers as Teachers,
    TeacherServer as TeacherServer,
)
from ludic.training.dpo_trainer import DPOTrainer as DPOTrainer, DPOTrainerConfig as DPOTrainerConfig
from ludic.training.evaluators.held_out import (
    ImplicitRewardEvaluator as ImplicitRewardEvaluator,
    PreferenceEvaluator as PreferenceEvaluator,
)
from ludic.training.filters import (
    any_of as any_of,
    apply_filter as apply_filter,
    combine as combine,
    drop_incomplete_completions as drop_incomplete_completions,
    drop_parse_errors as drop_parse_errors,
    drop_truncated as drop_truncated,
    keep_all as keep_all,
)
from ludic.training.group_credit import (
    EachRewardNormalized as EachRewardNormalized,
    GreedyBaselineReturn as GreedyBaselineReturn,
    PassAtKReturn as PassAtKReturn,
)
from ludic.training.loggers import (
    JSONLLogger as JSONLLogger,
    MlflowLogger as MlflowLogger,
    PrintLogger as PrintLogger,
    RichLiveLogger as RichLiveLogger,
    TeeLogger as TeeLogger,
    TensorboardLogger as TensorboardLogger,
    TrackioLogger as TrackioLogger,
    TrainingLogger as TrainingLogger,
    WandbLogger as WandbLogger,
)
from ludic.training.loop.profiler import Profiler as Profiler
from ludic.training.loop.schedule import LearningRateSchedule as LearningRateSchedule
from ludic.training.loss import (
    DPPO as DPPO,
    M2PO as M2PO,
    BatchTotals as BatchTotals,
    BradleyTerryLoss as BradleyTerryLoss,
    CISPOLoss as CISPOLoss,
    ClippedSurrogateLoss as ClippedSurrogateLoss,
    CompositeLoss as CompositeLoss,
    CriticSettings as CriticSettings,
    DPOLoss as DPOLoss,
    EntropyBonus as EntropyBonus,
    GMPOLoss as GMPOLoss,
    IcePop as IcePop,
    KLLoss as KLLoss,
    KPop as KPop,
    KTOLoss as KTOLoss,
    ListwiseClipLoss as ListwiseClipLoss,
    ListwiseLoss as ListwiseLoss,
    Loss as Loss,
    LossTerm as LossTerm,
    MaskedCausalLMCrossEntropyLoss as MaskedCausalLMCrossEntropyLoss,
    MaskedImportanceSampling as MaskedImportanceSampling,
    ReferenceKLLoss as ReferenceKLLoss,
    ReinforceBaselineLoss as ReinforceBaselineLoss,
    ReinforceLoss as ReinforceLoss,
    SAPOLoss as SAPOLoss,
    SharedContext as SharedContext,
    TokenClippedSurrogateLoss as TokenClippedSurrogateLoss,
    TokenKLLoss as TokenKLLoss,
    TruncatedImportanceSampling as TruncatedImportanceSampling,
    ValueLoss as ValueLoss,
    selective_log_softmax as selective_log_softmax,
)
from ludic.training.maxent import ListwiseCredit as ListwiseCredit
from ludic.training.preflight.check import Preflight as Preflight, PreflightReport as PreflightReport
from ludic.training.presets import (
    make_bradley_terry as make_bradley_terry,
    make_cispo as make_cispo,
    make_dapo as make_dapo,
    make_dpo as make_dpo,
    make_dr_grpo as make_dr_grpo,
    make_gmpo as make_gmpo,
    make_grpo as make_grpo,
    make_grpo_with_rm as make_grpo_with_rm,
    make_gspo as make_gspo,
    make_kto as make_kto,
    make_maxent_grpo as make_maxent_grpo,
    make_opd as make_opd,
    make_pass_at_k as make_pass_at_k,
    make_ppo as make_ppo,
    make_reinforce as make_reinforce,
    make_reinforce_baseline as make_reinforce_baseline,
    make_reinforce_plus_plus as make_reinforce_plus_plus,
    make_remax as make_remax,
    make_rloo as make_rloo,
    make_sapo as make_sapo,
    make_scalerl as make_scalerl,
    make_scalerl_with_rm as make_scalerl_with_rm,
    make_sft as make_sft,
)
from ludic.training.process_rewards import ProcessReward as ProcessReward
from ludic.training.reducers import (
    Reducer as Reducer,
    apply_reducers_to_records as apply_reducers_to_records,
    default_reducers as default_reducers,
)
from ludic.training.reference import (
    AttachedReference as AttachedReference,
    CachedReference as CachedReference,
    FrozenModel as FrozenModel,
    PrecomputedReference as PrecomputedReference,
    WithoutAdapters as WithoutAdapters,
)
from ludic.training.reward_scorer import (
    RewardModelClient as RewardModelClient,
    RewardModelReward as RewardModelReward,
    RewardModelScorer as RewardModelScorer,
)
from ludic.training.rm_trainer import RMTrainer as RMTrainer, RMTrainerConfig as RMTrainerConfig
from ludic.training.rollouts.engine import RolloutEngine as RolloutEngine
from ludic.training.rollouts.requests import (
    GRPORequestStrategy as GRPORequestStrategy,
    IdentityStrategy as IdentityStrategy,
    RequestStrategy as RequestStrategy,
    make_dataset_queue_requests_fn as make_dataset_queue_requests_fn,
    make_dataset_sequence_requests_fn as make_dataset_sequence_requests_fn,
    make_requests_fn_from_queue as make_requests_fn_from_queue,
)
from ludic.training.rollouts.rolling import RollingBatchSource as RollingBatchSource
from ludic.training.samples.preference import (
    create_preference_saw_items as create_preference_saw_items,
    load_preference_items as load_preference_items,
    preference_dataset_to_saw_items as preference_dataset_to_saw_items,
    shuffle_preference_pairs as shuffle_preference_pairs,
)
from ludic.training.samples.sft import (
    ChatTemplateResult as ChatTemplateResult,
    format_chat_template_text as format_chat_template_text,
    tokenize_with_chat_template as tokenize_with_chat_template,
)
from ludic.training.stats import aggregate_stats as aggregate_stats
from ludic.training.trainer import Trainer as Trainer
from ludic.training.types import (
    ActorTokenLogps as ActorTokenLogps,
    BatchCredit as BatchCredit,
    BatchSource as BatchSource,
    Candidates as Candidates,
    CreditAssigner as CreditAssigner,
    CtxSpec as CtxSpec,
    EnvSpec as EnvSpec,
    ProtocolSpec as ProtocolSpec,
    ReferencePolicy as ReferencePolicy,
    RolloutRequest as RolloutRequest,
    SampleAttachments as SampleAttachments,
    SampleFilter as SampleFilter,
    SAWBatch as SAWBatch,
    SAWItem as SAWItem,
)

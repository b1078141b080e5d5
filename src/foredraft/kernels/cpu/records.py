"""Records that the native library reads. They mirror foredraft.h field by field."""

import ctypes
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p

import torch

KV_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # formats of keys and values, as in foredraft.h


class WeightRecord(ctypes.Structure):
    """Packed matrix (fd_weight)."""

    _fields_ = (
        *((name, c_void_p) for name in "data scale bias".split()),
        *((name, c_int32) for name in "n k kind group".split()),
    )


class RowsRecord(ctypes.Structure):
    """Rows of a forward pass (fd_rows)."""

    _fields_ = (
        *((name, c_int32) for name in "num_rows page_size num_logits max_keys".split()),
        ("tokens", c_void_p),
        ("write_slots", c_void_p),
        ("pages", c_void_p),
        ("page_offset", c_void_p),
        ("path_slots", c_void_p),
        ("path_offset", c_void_p),
        ("num_committed", c_void_p),
        ("path_length", c_void_p),
        ("logit_rows", c_void_p),
    )


class ExpertsRecord(ctypes.Structure):
    """Mixture of experts (fd_experts)."""

    _fields_ = (
        *((name, c_int32) for name in "count per_token inner activation".split()),
        ("alpha", c_float),
        ("limit", c_float),
        ("is_normalised", c_int32),
        ("router", WeightRecord),
        ("gate_up", POINTER(WeightRecord)),
        ("down", POINTER(WeightRecord)),
    )


class MixerRecord(ctypes.Structure):
    """Recurrent part of a layer (fd_mixer)."""

    _fields_ = (
        *((name, c_int32) for name in "kind channels taps heads groups key_dim value_dim norm_width".split()),
        *((name, c_int32) for name in "width inner conv_at gate_at step_at share_at".split()),
        *((name, c_float) for name in "eps min_step max_step".split()),
        *((name, c_void_p) for name in "conv_weight conv_bias rate step_bias skip norm".split()),
        ("input", WeightRecord),
        ("out", WeightRecord),
        ("steps", WeightRecord),
    )


class RunsRecord(ctypes.Structure):
    """Runs of rows from one recurrent state to another (fd_runs)."""

    _fields_ = (
        ("num_runs", c_int32),
        *((name, c_void_p) for name in "first_row length start_state end_state slot start_slot".split()),
    )


class MixingRecord(ctypes.Structure):
    """Arguments of the recurrent part of one layer (fd_mixing)."""

    _fields_ = (
        ("mixer", POINTER(MixerRecord)),
        ("runs", POINTER(RunsRecord)),
        *((name, c_void_p) for name in "projected conv_states states out".split()),
        ("num_rows", c_int32),
    )


class LayerRecord(ctypes.Structure):
    """Decoder layer (fd_layer)."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("attention_post_norm", c_void_p),
        ("mlp_post_norm", c_void_p),
        *((name, WeightRecord) for name in "qkv out gate_up down".split()),
        ("sliding_window", c_int32),
        ("positions", c_int32),
        ("experts", POINTER(ExpertsRecord)),
        ("shared_gate", c_void_p),
        ("sinks", c_void_p),
        ("mixer", POINTER(MixerRecord)),
    )


class ModelRecord(ctypes.Structure):
    """Decoder, or the decoder of a drafter (fd_model)."""

    _fields_ = (
        *((name, c_int32) for name in "layers hidden heads kv_heads head_dim rotary inner activation".split()),
        ("kv_kind", c_int32),
        ("has_bf16_embedding", c_int32),
        ("input_kind", c_int32),
        ("norm_before_residual", c_int32),
        ("is_parallel", c_int32),
        ("has_joint_head_norm", c_int32),
        ("has_attention_gate", c_int32),
        *((name, c_float) for name in "eps scale softcap embedding_scale residual_scale logit_scale".split()),
        ("logit_softcap", c_float),
        *(
            (name, c_void_p)
            for name in "embedding norm input_norm embedding_norm norm_bias cos sin local_cos local_sin".split()
        ),
        ("layer", POINTER(LayerRecord)),
        ("fc", WeightRecord),
        ("head", WeightRecord),
        ("adapter", POINTER(LayerRecord)),
    )


class LowRankRecord(ctypes.Structure):
    """Change of a product by an adapter (fd_low_rank)."""

    _fields_ = (("a", WeightRecord), *((name, c_void_p) for name in "b column width offset".split()))


# Products of a layer that adapters change, in the order of FD_QKV and so on, and of the bits of `products`.
PRODUCTS = ("qkv", "out", "gate_up", "down")


class LayerChangeRecord(ctypes.Structure):
    """Changes of the products of a layer by an adapter (fd_layer_change)."""

    _fields_ = (("of", LowRankRecord * len(PRODUCTS)),)


class AdaptedRecord(ctypes.Structure):
    """Rows of a pass with adapters (fd_adapted)."""

    _fields_ = (
        *((name, c_int32) for name in "num_places num_groups max_rank products".split()),
        ("input_bytes", c_int64),
        *((name, c_void_p) for name in "place row group first change input inner".split()),
    )


class ImagesRecord(ctypes.Structure):
    """Rows of images (fd_images)."""

    _fields_ = (
        *((name, c_void_p) for name in "index states ahead cos sin added".split()),
        ("num_added", c_int32),
    )


class PassRecord(ctypes.Structure):
    """Inputs and outputs of a forward pass (fd_pass)."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("cross_keys", c_void_p),
        ("cross_values", c_void_p),
        ("hidden_layers", c_void_p),
        ("hidden_layer_count", c_int32),
        ("has_bf16_features", c_int32),
        ("reads_logit_rows", c_int32),
        ("inputs", c_void_p),
        ("features", c_void_p),
        ("logits", c_void_p),
        ("scratch", c_void_p),
        ("adapted", POINTER(AdaptedRecord)),
        ("images", POINTER(ImagesRecord)),
        ("runs", POINTER(RunsRecord)),
        ("conv_states", c_void_p),
        ("states", c_void_p),
    )


class AttentionRecord(ctypes.Structure):
    """Inputs and output of one attention call (fd_attention)."""

    _fields_ = (
        ("query", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("out", c_void_p),
        *((name, c_int32) for name in "heads kv_heads head_dim kv_kind sliding_window".split()),
        ("scale", c_float),
        ("softcap", c_float),
        ("bias", c_void_p),
        ("max_distance", c_int32),
        ("sinks", c_void_p),
        ("query_rows", c_void_p),
        ("ahead", c_void_p),
    )


class NormRecord(ctypes.Structure):
    """Weights of a norm (fd_norm)."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class Seq2SeqLayerRecord(ctypes.Structure):
    """Decoder layer with cross-attention (fd_encdec_layer)."""

    _fields_ = (
        *((name, NormRecord) for name in "self_norm cross_norm mlp_norm".split()),
        *((name, WeightRecord) for name in "qkv self_out cross_query cross_out mlp_in mlp_out".split()),
        ("bias", c_void_p),
    )


class Seq2SeqRecord(ctypes.Structure):
    """Decoder of an encoder-decoder model (fd_encdec)."""

    _fields_ = (
        *((name, c_int32) for name in "layers hidden heads head_dim inner activation".split()),
        *((name, c_int32) for name in "is_gated is_post_norm kv_kind max_distance is_encoder".split()),
        *((name, c_float) for name in "eps scale logit_scale".split()),
        ("norm", NormRecord),
        ("layer", POINTER(Seq2SeqLayerRecord)),
        ("head", WeightRecord),
    )


class LinearRecord(ctypes.Structure):
    """Arguments of a product of activations and a packed matrix (fd_linear_args)."""

    _fields_ = (
        ("weight", POINTER(WeightRecord)),
        ("x", c_void_p),
        ("out", c_void_p),
        ("scratch", c_void_p),
        ("rows", c_int32),
    )


class SettingsRecord(ctypes.Structure):
    """Sampling parameters of a row (fd_settings)."""

    _fields_ = tuple((name, c_double) for name in "temperature top_k top_p min_p typical_p".split())


class SamplingRecord(ctypes.Structure):
    """Arguments of one call of the sampler (fd_sampling)."""

    _fields_ = (
        *((name, c_void_p) for name in "logits rows settings keys probs tokens masses ids counts".split()),
        ("stride", c_int64),
        ("margin", c_double),
        *((name, c_int32) for name in "num_rows vocab is_bf16".split()),
    )


class WalkRequestRecord(ctypes.Structure):
    """A request whose draft is verified (fd_walk_request)."""

    _fields_ = (
        ("settings", SettingsRecord),
        *((name, c_uint64) for name in "seed sample_index".split()),
        *((name, c_int64) for name in "position first_row".split()),
        *((name, c_int32) for name in "num_rows walk".split()),
    )


class WalksRecord(ctypes.Structure):
    """Arguments of a verification (fd_walks)."""

    _fields_ = (
        *((name, c_void_p) for name in "logits q tokens parents num_sampled".split()),
        ("requests", POINTER(WalkRequestRecord)),
        *((name, c_void_p) for name in "nodes following counts".split()),
        *((name, c_int64) for name in "stride q_stride".split()),
        ("margin", c_double),
        *((name, c_int32) for name in "num_requests vocab is_bf16".split()),
    )


class DraftsRecord(ctypes.Structure):
    """Sampling of chains of draft tokens (fd_drafts)."""

    _fields_ = (
        *((name, c_void_p) for name in "settings keys depths end_ids end_offset uses_q token_ids".split()),
        *((name, c_void_p) for name in "q tokens counts".split()),
        ("margin", c_double),
        *((name, c_int32) for name in "num_drafts max_depth columns vocab".split()),
    )


class SuffixChainRecord(ctypes.Structure):
    """Chain of draft tokens from the matches of suffix automata (fd_suffix_chain)."""

    _fields_ = (
        ("drafts", DraftsRecord),
        *((name, c_void_p) for name in "matches discounts expected_accepted".split()),
        ("min_confidence", c_double),
        ("num_matches", c_int32),
    )


class ChainRecord(ctypes.Structure):
    """Chains of draft tokens of a decoder (fd_chain)."""

    _fields_ = (
        ("drafts", DraftsRecord),
        ("first", POINTER(RowsRecord)),
        *((name, c_void_p) for name in "starts slots pages page_offset".split()),
        *((name, c_int32) for name in "max_keys page_size".split()),
    )


class HeadStepRecord(ctypes.Structure):
    """Step of a network on the target's last state (fd_step)."""

    _fields_ = (
        ("input", WeightRecord),
        ("norm", NormRecord),
        ("cell_norm", NormRecord),
        ("embedding", c_void_p),
        ("blocks", POINTER(WeightRecord)),
        ("head", WeightRecord),
        ("num_blocks", c_int32),
    )


class StepNetworkRecord(ctypes.Structure):
    """Network of such steps (fd_step_network)."""

    _fields_ = (
        ("steps", POINTER(HeadStepRecord)),
        ("input_weight", c_void_p),
        *((name, c_int32) for name in "kind num_steps hidden inner has_bf16_embedding".split()),
        *((name, c_float) for name in "token_share eps".split()),
    )


class StepPassRecord(ctypes.Structure):
    """One step over some rows (fd_step_pass)."""

    _fields_ = (
        *((name, c_void_p) for name in "states tokens next logits scratch".split()),
        *((name, c_int32) for name in "step num_rows".split()),
    )


class StepRootsRecord(ctypes.Structure):
    """Roots of chains of steps (fd_step_roots)."""

    _fields_ = (*((name, c_void_p) for name in "states tokens scratch".split()), ("has_bf16_states", c_int32))


class TuningRecord(ctypes.Structure):
    """Choices that change the time of products alone (fd_tuning)."""

    _fields_ = (("prefetch", c_int32), ("vectors", c_int32), ("chunk_bytes", c_int32))


RECORDS = (
    WeightRecord,
    RowsRecord,
    LayerRecord,
    ModelRecord,
    PassRecord,
    AttentionRecord,
    LinearRecord,
    Seq2SeqLayerRecord,
    Seq2SeqRecord,
    SettingsRecord,
    SamplingRecord,
    DraftsRecord,
    ChainRecord,
    HeadStepRecord,
    StepNetworkRecord,
    StepPassRecord,
    StepRootsRecord,
    TuningRecord,
    ExpertsRecord,
    LayerChangeRecord,
    AdaptedRecord,
    ImagesRecord,
    MixerRecord,
    RunsRecord,
    MixingRecord,
    SuffixChainRecord,
    WalkRequestRecord,
    WalksRecord,
)

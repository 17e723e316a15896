//! Detects the format of the optimizer state, from the content metadata and the names of tensors.

use std::fmt;

use dcp_core::metadata::Entry;
use dcp_core::value::Dict;
use dcp_core::{CheckpointMetadata, Value};

use super::keys::{BucketKey, GroupObjectKey, ParamStateKey};

/// The format in which a Megatron-Core checkpoint divides the optimizer's state into tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OptimizerFormat {
    /// There is no optimizer state.
    None,
    /// One flat tensor for each bucket of gradients and each state, without names of parameters.
    /// The default of 0.15 and later. Only the number of data-parallel ranks can change.
    DpReshardable,
    /// One tensor for each parameter and state, of the parameter's shape. Optional in 0.15 and
    /// later. Everything can change. As 0.15 to 0.19 wrote it, it may be damaged:
    /// [`check_optimizer`](super::check_optimizer).
    FullyReshardable,
    /// One tensor for each parameter and state, flattened within the chunks of the model's grid.
    /// Of 0.8 to 0.15; Megatron itself reads it no more from 0.16 on. Everything can change.
    FullyShardedModelSpace,
    /// One object for each model-parallel rank, with all buckets one after the other. Of 0.14 and
    /// earlier, when the save was not parallel, and on request later. Only the number of
    /// data-parallel ranks can change.
    DpZeroGatherScatter,
    /// Buckets in the parts that the data-parallel ranks have, padding included. Of 0.6 to 0.14.
    /// Only the number of data-parallel ranks can change.
    FullyShardedBucketSpace,
    /// Megatron-FSDP's: a tensor for each parameter and state under PyTorch's names. Everything
    /// can change.
    FsdpDtensor,
    /// Mixed precision without a distributed optimizer: one tensor for each parameter and state,
    /// of the parameter's shape. Of every version. Everything can change.
    NonDistributed,
    /// Whole parameters, dealt out to the data-parallel ranks (Muon and its like). Of 0.16 and
    /// later. The number of data-parallel ranks cannot change.
    LayerWise,
    /// A `distrib_optim.pt` in each `mp_rank_*` folder, of the format that torch.save wrote
    /// before there were distributed checkpoints. Only the number of data-parallel ranks can
    /// change.
    LegacyDistributed,
}

impl OptimizerFormat {
    /// The format of the checkpoint with this index and this common state.
    ///
    /// Names that are there decide before what the checkpoint says of itself: a checkpoint whose
    /// optimizer was left out has none, whatever its `content_metadata` states.
    #[must_use]
    pub fn of(metadata: &CheckpointMetadata, common: &Dict) -> Self {
        let mut found = Found::default();
        for (fqn, entry) in metadata.iter() {
            found.see(fqn, entry);
        }
        found.format(stated(common))
    }

    /// Whether the model-parallel layout (tensor, pipeline and expert) can change without naming
    /// the parameters first.
    #[must_use]
    pub fn is_by_parameter(self) -> bool {
        matches!(
            self,
            Self::FullyReshardable
                | Self::FullyShardedModelSpace
                | Self::FsdpDtensor
                | Self::NonDistributed
                | Self::LayerWise
        )
    }

    /// Whether the state is in flat buffers, which do not name their parameters.
    #[must_use]
    pub fn is_flat(self) -> bool {
        matches!(
            self,
            Self::DpReshardable
                | Self::DpZeroGatherScatter
                | Self::FullyShardedBucketSpace
                | Self::LegacyDistributed
        )
    }

    /// The name that Megatron gives it in `content_metadata`, or a description.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::DpReshardable => "dp_reshardable",
            Self::FullyReshardable => "fully_reshardable",
            Self::FullyShardedModelSpace => "fully_sharded_model_space",
            Self::DpZeroGatherScatter => "dp_zero_gather_scatter",
            Self::FullyShardedBucketSpace => "fully_sharded_bucket_space",
            Self::FsdpDtensor => "fsdp_dtensor",
            Self::NonDistributed => "non-distributed",
            Self::LayerWise => "layer-wise",
            Self::LegacyDistributed => "distrib_optim.pt",
        }
    }

    fn of_name(name: &str) -> Option<Self> {
        let all = [
            Self::DpReshardable,
            Self::FullyReshardable,
            Self::FullyShardedModelSpace,
            Self::DpZeroGatherScatter,
            Self::FullyShardedBucketSpace,
            Self::FsdpDtensor,
        ];
        all.into_iter().find(|format| format.name() == name)
    }
}

impl fmt::Display for OptimizerFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The format that the names in a checkpoint show.
#[derive(Debug, Default)]
struct Found {
    master: bool,
    fp32_master: bool,
    buckets: bool,
    param_state: bool,
    by_parameter: bool,
    fsdp: bool,
    legacy: bool,
}

impl Found {
    fn see(&mut self, fqn: &str, entry: &Entry) {
        if fqn.starts_with("optimizer.param_to_group_meta") {
            self.fsdp = true;
        } else if let Some(key) = ParamStateKey::parse(fqn) {
            self.by_parameter = true;
            self.master |= key.state == "param";
            self.fp32_master |= key.state == "fp32_param";
        } else if entry.as_tensor().is_some() && BucketKey::parse(fqn).is_some() {
            self.buckets = true;
        } else if GroupObjectKey::parse(fqn).is_some_and(|key| key.name == "param_state") {
            self.param_state = true;
        } else if fqn.contains("distrib_optim") {
            self.legacy = true;
        }
    }

    fn format(&self, stated: Option<OptimizerFormat>) -> OptimizerFormat {
        use OptimizerFormat as F;
        if self.fsdp || (self.by_parameter && stated == Some(F::FsdpDtensor)) {
            F::FsdpDtensor
        } else if self.buckets {
            match stated {
                Some(F::FullyShardedBucketSpace) => F::FullyShardedBucketSpace,
                _ => F::DpReshardable,
            }
        } else if self.param_state {
            F::DpZeroGatherScatter
        } else if self.by_parameter {
            match stated {
                Some(F::FullyReshardable) => F::FullyReshardable,
                Some(F::FullyShardedModelSpace) => F::FullyShardedModelSpace,
                Some(F::LayerWise) => F::LayerWise,
                _ if self.master && !self.fp32_master => F::FullyReshardable,
                _ => F::NonDistributed,
            }
        } else if self.legacy {
            F::LegacyDistributed
        } else {
            F::None
        }
    }
}

/// The format that the common state records.
fn stated(common: &Dict) -> Option<OptimizerFormat> {
    let text = |dict: &Dict, key: &str| dict.get(key).and_then(Value::as_str).map(str::to_owned);
    let content = common.get("content_metadata").and_then(Value::as_dict);
    let of_content = content.and_then(|dict| text(dict, "distrib_optim_sharding_type"));
    let optimizer = common.get("optimizer").and_then(Value::as_dict);
    let named = of_content.or_else(|| optimizer.and_then(sharding_type));
    if let Some(format) = named.as_deref().and_then(OptimizerFormat::of_name) {
        return Some(format);
    }
    if optimizer.is_some_and(is_layer_wise) {
        return Some(OptimizerFormat::LayerWise);
    }
    None
}

/// `param_state_sharding_type` of an optimizer, or of the first of a chain.
fn sharding_type(optimizer: &Dict) -> Option<String> {
    let own = |dict: &Dict| {
        dict.get("param_state_sharding_type").and_then(Value::as_str).map(str::to_owned)
    };
    own(optimizer).or_else(|| optimizer.iter().find_map(|(_, value)| own(value.as_dict()?)))
}

/// Whether `fp32_from_fp16_params` is a dict of groups by their numbers, as layer-wise
/// optimizers have it.
fn is_layer_wise(optimizer: &Dict) -> bool {
    let own = |dict: &Dict| matches!(dict.get("fp32_from_fp16_params"), Some(Value::Dict(_)));
    own(optimizer) || optimizer.iter().any(|(_, value)| value.as_dict().is_some_and(own))
}

#[cfg(test)]
mod tests {
    use dcp_core::DType;
    use dcp_core::metadata::{ObjectEntry, TensorEntry};

    use super::*;

    fn of(names: &[&str], stated: Option<&str>) -> OptimizerFormat {
        let mut metadata = CheckpointMetadata::new();
        for name in names {
            let entry = match name.contains("/shard_") {
                true => Entry::Object(ObjectEntry::new(None)),
                false => Entry::Tensor(TensorEntry::new(DType::Float32, [4])),
            };
            metadata.insert(*name, entry);
        }
        let content: Dict = stated
            .map(|name| ("distrib_optim_sharding_type", Value::from(name)))
            .into_iter()
            .collect();
        OptimizerFormat::of(&metadata, &Dict::from([("content_metadata", Value::from(content))]))
    }

    #[test]
    fn names_and_statements_tell_the_format() {
        use OptimizerFormat as F;
        let bucket =
            "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(a, b).bucket_idx_0.param";
        let object = "optimizer.distributed.dp_group_idx_0.param_state/shard_0_1";
        let (param, fp32) = ("optimizer.state.param.w", "optimizer.state.fp32_param.w");
        assert_eq!(of(&["w"], None), F::None);
        assert_eq!(of(&["w"], Some("dp_reshardable")), F::None);
        assert_eq!(of(&[bucket], None), F::DpReshardable);
        assert_eq!(of(&[bucket], Some("fully_sharded_bucket_space")), F::FullyShardedBucketSpace);
        assert_eq!(of(&[object], None), F::DpZeroGatherScatter);
        assert_eq!(of(&[param], None), F::FullyReshardable);
        assert_eq!(of(&[fp32], Some("fully_sharded_model_space")), F::FullyShardedModelSpace);
        assert_eq!(of(&[fp32], None), F::NonDistributed);
        assert_eq!(of(&[fp32], Some("fsdp_dtensor")), F::FsdpDtensor);
        assert_eq!(of(&["optimizer.param_to_group_meta.w"], None), F::FsdpDtensor);
    }

    #[test]
    fn older_checkpoints_name_it_in_the_optimizer() {
        let mut metadata = CheckpointMetadata::new();
        let tensor = || Entry::Tensor(TensorEntry::new(DType::Float32, [4]));
        metadata.insert("optimizer.state.fp32_param.w", tensor());
        let kind = Dict::from([("param_state_sharding_type", "fully_sharded_model_space")]);
        let chain: Dict = [(Value::Int(0), Value::Dict(kind))].into_iter().collect();
        let common = Dict::from([("optimizer", Value::from(chain))]);
        let found = OptimizerFormat::of(&metadata, &common);
        assert_eq!(found, OptimizerFormat::FullyShardedModelSpace);

        let groups: Dict = [(Value::Int(0), Value::List(Vec::new()))].into_iter().collect();
        let kind = Dict::from([("fp32_from_fp16_params", Value::from(groups))]);
        let common = Dict::from([("optimizer", Value::from(kind))]);
        assert_eq!(OptimizerFormat::of(&metadata, &common), OptimizerFormat::LayerWise);
    }
}

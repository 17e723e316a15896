//! Parses and builds the names of optimizer state.

use std::fmt;
use std::sync::Arc;

use dcp_core::CheckpointMetadata;

/// A quantity that the optimizer keeps for every element of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum StateKind {
    /// The parameter in the optimizer's precision: `param` in the formats of 0.15 and later,
    /// `fp32_param` in the others.
    Master,
    /// Adam's running mean of gradients.
    ExpAvg,
    /// Adam's running mean of squared gradients.
    ExpAvgSq,
}

impl StateKind {
    /// All kinds, in the order in which Megatron writes them.
    pub const ALL: [Self; 3] = [Self::Master, Self::ExpAvg, Self::ExpAvgSq];

    /// The name in `fully_reshardable` and in flat buffers.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Master => "param",
            Self::ExpAvg => "exp_avg",
            Self::ExpAvgSq => "exp_avg_sq",
        }
    }

    /// The kind of a name, in whichever format it is used.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        match name {
            "param" | "fp32_param" => Some(Self::Master),
            "exp_avg" => Some(Self::ExpAvg),
            "exp_avg_sq" => Some(Self::ExpAvgSq),
            _ => None,
        }
    }
}

impl fmt::Display for StateKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

const CHAINED: &str = "chained_";
const PARAM_STATE: &str = "optimizer.state.";
const DISTRIBUTED: &str = "optimizer.distributed.";

/// The name of a tensor of one parameter's state: `optimizer.state.<state>.<model key>`, perhaps
/// behind `chained_<i>.`, as 0.14 and earlier had it for every chain of optimizers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ParamStateKey<'a> {
    /// The state's name as stored.
    pub(crate) state: &'a str,
    /// The key of the model's tensor.
    pub(crate) param: &'a str,
}

impl<'a> ParamStateKey<'a> {
    pub(crate) fn parse(fqn: &'a str) -> Option<Self> {
        let (_, rest) = split_chain(fqn);
        let (state, param) = rest.strip_prefix(PARAM_STATE)?.split_once('.')?;
        (!state.is_empty() && !param.is_empty()).then_some(Self { state, param })
    }
}

/// The name in `fully_reshardable` of a parameter's state.
pub(crate) fn param_state_fqn(state: &str, param: &str) -> String {
    format!("{PARAM_STATE}{state}.{param}")
}

/// The part of an optimizer that belongs to one group of data-parallel ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct GroupKey {
    /// The number of the chained optimizer, of several; `None` when there is one.
    pub(crate) chained: Option<u64>,
    /// The number of the group: a rank among the model-parallel ones.
    pub(crate) group: u64,
}

impl GroupKey {
    /// `[chained_<i>.]optimizer.distributed.dp_group_idx_<g>`
    pub(crate) fn prefix(&self) -> String {
        let chained = self.chained.map(|at| format!("{CHAINED}{at}.")).unwrap_or_default();
        format!("{chained}{DISTRIBUTED}dp_group_idx_{}", self.group)
    }

    /// The group of a name, and what follows its number and a dot.
    fn parse(fqn: &str) -> Option<(Self, &str)> {
        let (chained, rest) = split_chain(fqn);
        let rest = rest.strip_prefix(DISTRIBUTED)?.strip_prefix("dp_group_idx_")?;
        let (group, rest) = number(rest)?;
        Some((Self { chained, group }, rest.strip_prefix('.')?))
    }
}

/// The name of an object of a group, such as `optimizer` or `param_state`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupObjectKey<'a> {
    pub(crate) group: GroupKey,
    pub(crate) name: &'a str,
}

impl<'a> GroupObjectKey<'a> {
    pub(crate) fn parse(fqn: &'a str) -> Option<Self> {
        let (key, _) = fqn.split_once("/shard_")?;
        let (group, name) = GroupKey::parse(key)?;
        Some(Self { group, name })
    }
}

/// The name of a tensor of a bucket:
/// `….gbuf_idx_<b>.dtype_(torch.bfloat16, torch.float32).bucket_idx_<k>.<state>`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BucketKey {
    pub(crate) buffer: BufferKey,
    pub(crate) bucket: u64,
    /// The state's name.
    pub(crate) state: Arc<str>,
}

/// One gradient buffer of a group.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BufferKey {
    pub(crate) group: GroupKey,
    pub(crate) buffer: u64,
    /// Python's text for the dtypes of parameters and gradients.
    pub(crate) dtypes: Arc<str>,
}

impl fmt::Display for BufferKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.gbuf_idx_{}.dtype_{}", self.group.prefix(), self.buffer, self.dtypes)
    }
}

impl BucketKey {
    pub(crate) fn parse(fqn: &str) -> Option<Self> {
        let (group, rest) = GroupKey::parse(fqn)?;
        let (buffer, rest) = number(rest.strip_prefix("gbuf_idx_")?)?;
        let (dtypes, rest) = rest.strip_prefix(".dtype_")?.split_once(".bucket_idx_")?;
        let (bucket, rest) = number(rest)?;
        let state = rest.strip_prefix('.').filter(|state| !state.is_empty())?;
        let buffer = BufferKey { group, buffer, dtypes: dtypes.into() };
        Some(Self { buffer, bucket, state: state.into() })
    }
}

/// The number of the data-parallel group that a tensor or object of an optimizer belongs to, of
/// the formats that keep one for each rank of the model.
pub(crate) fn group_of(fqn: &str) -> Option<u64> {
    GroupKey::parse(fqn).map(|(group, _)| group.group)
}

/// Returns the number of ranks of the model that have buffers of their own for its dense
/// parameters; `None` when the optimizer's state is not in such buffers.
pub(crate) fn model_parallel_groups<'a>(fqns: impl Iterator<Item = &'a str>) -> Option<u64> {
    let groups = fqns.filter_map(GroupKey::parse).map(|(group, _)| group);
    let dense = groups.filter(|group| group.chained.is_none_or(|chained| chained == 0));
    dense.map(|group| group.group.saturating_add(1)).max()
}

/// Whether a name is one of optimizer state, in any format.
#[must_use]
pub fn is_optimizer_key(fqn: &str) -> bool {
    let (_, rest) = split_chain(fqn);
    rest.starts_with("optimizer.")
}

/// The names of tensors that belong to the model rather than to the optimizer.
pub(crate) fn model_tensors(
    metadata: &CheckpointMetadata,
) -> impl Iterator<Item = (usize, &Arc<str>, &dcp_core::metadata::TensorEntry)> {
    let tensors = metadata.iter().enumerate();
    let tensors =
        tensors.filter_map(|(at, (fqn, entry))| entry.as_tensor().map(|tensor| (at, fqn, tensor)));
    tensors.filter(|(_, fqn, _)| !is_optimizer_key(fqn))
}

/// The number in `chained_<i>.`, and what follows.
fn split_chain(fqn: &str) -> (Option<u64>, &str) {
    let found = fqn.strip_prefix(CHAINED).and_then(number);
    match found.and_then(|(at, rest)| Some((at, rest.strip_prefix('.')?))) {
        Some((at, rest)) => (Some(at), rest),
        None => (None, fqn),
    }
}

/// The decimal number that a text begins with, and what follows.
fn number(text: &str) -> Option<(u64, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, rest) = text.split_at_checked(digits)?;
    Some((number.parse().ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart() {
        let name = "chained_1.optimizer.distributed.dp_group_idx_3.gbuf_idx_2.dtype_(torch.bfloat16, torch.float32).bucket_idx_7.exp_avg_sq";
        let key = BucketKey::parse(name).unwrap();
        assert_eq!(key.buffer.group, GroupKey { chained: Some(1), group: 3 });
        assert_eq!((key.buffer.buffer, key.bucket, &*key.state), (2, 7, "exp_avg_sq"));
        assert_eq!(format!("{}.bucket_idx_7.exp_avg_sq", key.buffer), name);

        let object = "optimizer.distributed.dp_group_idx_0.param_state/shard_0_1";
        let object = GroupObjectKey::parse(object).unwrap();
        assert_eq!((object.group.group, object.name), (0, "param_state"));

        let state = ParamStateKey::parse("optimizer.state.fp32_param.a.b").unwrap();
        assert_eq!((state.state, state.param), ("fp32_param", "a.b"));
        assert_eq!(ParamStateKey::parse("chained_0.optimizer.state.param.a").unwrap().param, "a");
    }

    #[test]
    fn other_names_are_not() {
        for name in [
            "",
            "optimizer",
            "optimizer.state.param",
            "optimizer.state..a",
            "optimizer.distributed.dp_group_idx_.gbuf_idx_0.dtype_x.bucket_idx_0.param",
            "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_.param",
            "optimizer.distributed.dp_group_idx_99999999999999999999.gbuf_idx_0",
            "chained_x.optimizer.state.param.a",
            "decoder.layers.mlp.linear_fc1.weight",
        ] {
            assert_eq!(ParamStateKey::parse(name), None, "{name}");
            assert_eq!(BucketKey::parse(name), None, "{name}");
            assert_eq!(GroupObjectKey::parse(name), None, "{name}");
        }
        assert!(is_optimizer_key("chained_0.optimizer.state.param.a"));
        assert!(!is_optimizer_key("optimizer_like.weight"));
    }
}

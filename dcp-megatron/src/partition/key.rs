//! Parses the place of a tensor or object in the model from its name.

use crate::optimizer::ParamStateKey;

/// A name taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ModelKey<'a> {
    /// The prefix that the optimizer adds, such as `optimizer.state.exp_avg.`; empty for the model's
    /// own.
    pub(super) prefix: &'a str,
    /// The parameter's name.
    pub(super) param: &'a str,
    /// The stack of layers that it is in, such as `decoder.layers`, and which one.
    pub(super) layers: Option<(&'a str, Counted)>,
    /// The expert that it belongs to, or the axis of all experts.
    pub(super) experts: Option<Counted>,
}

/// The index among several layers or experts, as a name states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counted {
    /// All of them, along an axis in front.
    Axis,
    /// This one.
    Number(u64),
}

impl<'a> ModelKey<'a> {
    pub(super) fn parse(key: &'a str) -> Self {
        let param = ParamStateKey::parse(key).map_or(key, |state| state.param);
        let prefix = key.strip_suffix(param).unwrap_or_default();
        let layers = counted(param, "layers")
            .map(|(end, counted)| (param.get(..end).unwrap_or_default(), counted));
        // `experts.experts` is the list of experts in the layer of experts.
        let experts = counted(param, "experts.experts").map(|(_, counted)| counted);
        Self { prefix, param, layers, experts }
    }

    /// Returns the number of axes in front of the parameter's own.
    pub(super) fn prepended(&self) -> usize {
        let axis = |counted| usize::from(counted == Counted::Axis);
        self.layers.map_or(0, |(_, layer)| axis(layer)) + self.experts.map_or(0, axis)
    }

    /// The axis that counts experts.
    pub(super) fn expert_axis(&self) -> Option<usize> {
        let in_front = self.layers.is_some_and(|(_, layer)| layer == Counted::Axis);
        self.experts.filter(|expert| *expert == Counted::Axis).map(|_| usize::from(in_front))
    }

    /// The names of the second matrix of the layer of which this is (a part of) the first: of the
    /// same kind, and of the model itself.
    pub(super) fn second_matrix(&self) -> Option<[String; 2]> {
        let (module, _) = self
            .param
            .rsplit_once(".linear_fc1.")
            .or_else(|| self.param.strip_prefix("linear_fc1.").map(|rest| ("", rest)))?;
        let dot = if module.is_empty() { "" } else { "." };
        let name = format!("{module}{dot}linear_fc2.weight");
        Some([format!("{}{name}", self.prefix), name])
    }

    /// Whether it is behind all layers.
    pub(super) fn is_last(&self) -> bool {
        const LAST: [&str; 5] =
            ["output_layer.", "decoder.final_", "encoder.final_", "lm_head.", "mtp."];
        LAST.iter().any(|start| self.param.starts_with(start))
    }
}

/// Finds the module of a list that a name is of: the end of the list's name in it, and the number,
/// if there is one.
fn counted(param: &str, list: &str) -> Option<(usize, Counted)> {
    let mut from = 0;
    loop {
        let start = from + param.get(from..)?.find(list)?;
        let end = start + list.len();
        let begins = start == 0 || param.get(..start)?.ends_with('.');
        let Some(rest) = param.get(end..)?.strip_prefix('.').filter(|_| begins) else {
            from = end;
            continue;
        };
        let component = rest.split('.').next().unwrap_or_default();
        return Some((end, component.parse().map_or(Counted::Axis, Counted::Number)));
    }
}

/// The unique key of a sharded object, taken apart: its key, and its place in the grid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ObjectKey<'a> {
    pub(super) key: &'a str,
    pub(super) offsets: Vec<u64>,
    pub(super) grid: Vec<u64>,
}

impl<'a> ObjectKey<'a> {
    pub(super) fn parse(unique: &'a str) -> Option<Self> {
        let (key, place) = unique.rsplit_once("/shard_")?;
        let (offsets, grid) = place.split_once('_')?;
        let numbers =
            |text: &str| -> Option<Vec<u64>> { text.split('.').map(|n| n.parse().ok()).collect() };
        let (offsets, grid) = (numbers(offsets)?, numbers(grid)?);
        (!key.is_empty() && offsets.len() == grid.len()).then_some(Self { key, offsets, grid })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_and_experts_are_axes_or_numbers() {
        let key = ModelKey::parse("decoder.layers.mlp.experts.experts.linear_fc1.weight");
        assert_eq!(key.layers, Some(("decoder.layers", Counted::Axis)));
        assert_eq!((key.experts, key.prepended()), (Some(Counted::Axis), 2));
        assert_eq!(key.expert_axis(), Some(1));
        let key = ModelKey::parse("decoder.layers.3.mlp.experts.experts.linear_fc2.weight");
        assert_eq!(key.layers, Some(("decoder.layers", Counted::Number(3))));
        assert_eq!((key.prepended(), key.expert_axis()), (1, Some(0)));
        let key = ModelKey::parse("decoder.layers.0.mlp.experts.experts.7.linear_fc1.weight_w");
        assert_eq!((key.experts, key.prepended()), (Some(Counted::Number(7)), 0));
        let key = ModelKey::parse("decoder.layers.mlp.shared_experts.linear_fc1.weight");
        assert_eq!((key.experts, key.prepended()), (None, 1));
        let key = ModelKey::parse("multilayers.weight");
        assert_eq!((key.layers, key.prepended()), (None, 0));
    }

    #[test]
    fn optimizer_state_is_that_of_a_parameter() {
        let name = "chained_0.optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight";
        let key = ModelKey::parse(name);
        assert_eq!(key.prefix, "chained_0.optimizer.state.exp_avg.");
        assert_eq!(key.param, "decoder.layers.mlp.linear_fc1.weight");
        let [own, models] = key.second_matrix().unwrap();
        assert_eq!(models, "decoder.layers.mlp.linear_fc2.weight");
        assert_eq!(own, format!("{}{models}", key.prefix));
        assert_eq!(ModelKey::parse("embedding.word_embeddings.weight").second_matrix(), None);
    }

    #[test]
    fn object_keys_are_split_at_the_last_slash() {
        let object = ObjectKey::parse("rng_state/shard_0.1_1.2").unwrap();
        assert_eq!(
            (object.key, &*object.offsets, &*object.grid),
            ("rng_state", &[0, 1][..], &[1, 2][..])
        );
        for bad in
            ["rng_state", "a/shard_", "a/shard_0", "a/shard_0.1_2", "a/shard_x_1", "/shard_0_1"]
        {
            assert_eq!(ObjectKey::parse(bad), None, "{bad}");
        }
    }
}

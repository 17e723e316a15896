//! Parallel layouts: how many ranks a job has in each dimension.

use std::fmt;

use crate::args::MegatronArgs;

/// More chunks of layers than any pipeline has.
const CHUNKS_MAX: u64 = 1 << 20;

/// The shape of a job: tensor-, pipeline-, expert- and data-parallel sizes.
///
/// Ranks are numbered as Megatron-Core does by default (`tp-cp-ep-dp-pp`): tensor-parallel
/// neighbors are next to each other, pipeline stages furthest apart. Context-parallel ranks count
/// as data-parallel ones, because they hold the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ParallelLayout {
    /// Ranks that share a layer.
    pub tp: u32,
    /// Stages that share the layers.
    pub pp: u32,
    /// Ranks that share the experts of a layer.
    pub ep: u32,
    /// Ranks that share an expert; those that share a layer, unless given.
    pub etp: Option<u32>,
    /// Replicas of a dense layer; as few as there must be for the experts, unless given.
    pub dp: Option<u32>,
    /// The split of the decoder's layers among pipeline stages; by default each has equally many.
    pub split: PipelineSplit,
}

/// An uneven or interleaved split of the decoder's layers among pipeline stages. The default gives
/// each stage equally many layers, one after the other. Fields are named as options of Megatron-LM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct PipelineSplit {
    /// Layers of the first stage; the others share what is left.
    pub decoder_first_pipeline_num_layers: Option<u32>,
    /// Layers of the last stage.
    pub decoder_last_pipeline_num_layers: Option<u32>,
    /// Whether the embedding counts as a layer of the first stage.
    pub account_for_embedding_in_pipeline_split: bool,
    /// Whether the loss counts as a layer of the last stage.
    pub account_for_loss_in_pipeline_split: bool,
    /// Chunks of layers of each stage, which take turns with those of the other stages.
    pub virtual_pipeline_model_parallel_size: Option<u32>,
}

impl PipelineSplit {
    /// Reads the split from the arguments of a run.
    pub(crate) fn of_args(args: &MegatronArgs) -> Self {
        let count = |name| args.count(name).and_then(|n| u32::try_from(n).ok());
        let flag = |name| args.flag(name).unwrap_or(false);
        Self {
            decoder_first_pipeline_num_layers: count("decoder_first_pipeline_num_layers"),
            decoder_last_pipeline_num_layers: count("decoder_last_pipeline_num_layers"),
            account_for_embedding_in_pipeline_split: flag(
                "account_for_embedding_in_pipeline_split",
            ),
            account_for_loss_in_pipeline_split: flag("account_for_loss_in_pipeline_split"),
            virtual_pipeline_model_parallel_size: count("virtual_pipeline_model_parallel_size"),
        }
    }

    /// Returns the end and the stage of each chunk of `layers`, in the order of the layers; `None`
    /// when they cannot be divided so.
    pub(crate) fn ends(&self, layers: u64, stages: u32) -> Option<Vec<(u64, u32)>> {
        let wide = u64::from(stages);
        let chunks = u64::from(self.virtual_pipeline_model_parallel_size.unwrap_or(1));
        if stages <= 1 {
            return (stages == 1).then(|| vec![(layers, 0)]);
        }
        if chunks == 0 || chunks.checked_mul(wide)? > CHUNKS_MAX {
            return None;
        }
        let [first, last] =
            [self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers];
        let embedding = u64::from(self.account_for_embedding_in_pipeline_split);
        let loss = u64::from(self.account_for_loss_in_pipeline_split);
        if (first.is_some() || last.is_some()) && embedding + loss > 0 {
            return None;
        }
        let given = |layers: Option<u32>| u64::from(layers.unwrap_or(0));
        let set = u64::from(first.is_some()) + u64::from(last.is_some());
        let middle = layers.checked_sub(given(first))?.checked_sub(given(last))?;
        let middle = middle.checked_add(embedding)?.checked_add(loss)?;
        let each = match wide - set {
            0 if middle == 0 => 0,
            0 => return None,
            others => (middle % others == 0).then_some(middle / others)?,
        };
        let mut ends = Vec::new();
        let mut end = 0_u64;
        for chunk in 0..chunks {
            for stage in 0..stages {
                let (is_first, is_last) = (stage == 0, stage + 1 == stages);
                let of_stage = match (first, last) {
                    (Some(first), _) if is_first => first.into(),
                    (_, Some(last)) if is_last => last.into(),
                    _ => each,
                };
                if of_stage % chunks != 0 {
                    return None;
                }
                let mut count = of_stage / chunks;
                if is_first && chunk == 0 {
                    count = count.checked_sub(embedding)?;
                }
                if is_last && chunk + 1 == chunks {
                    count = count.checked_sub(loss)?;
                }
                end = end.checked_add(count)?;
                ends.push((end, stage));
            }
        }
        (end == layers).then_some(ends)
    }
}

impl ParallelLayout {
    /// Tensor- and pipeline-parallel, without expert parallelism.
    #[must_use]
    pub fn new(tp: u32, pp: u32) -> Self {
        Self { tp, pp, ep: 1, etp: None, dp: None, split: PipelineSplit::default() }
    }

    /// Sets the expert parallel size: the experts of a layer are shared by `ep` ranks.
    #[must_use]
    pub fn with_ep(mut self, ep: u32) -> Self {
        self.ep = ep;
        self
    }

    /// Sets the expert tensor parallel size: each expert is shared by `etp` ranks.
    #[must_use]
    pub fn with_etp(mut self, etp: u32) -> Self {
        self.etp = Some(etp);
        self
    }

    /// Sets the data parallel size: `dp` replicas of dense layers.
    #[must_use]
    pub fn with_dp(mut self, dp: u32) -> Self {
        self.dp = Some(dp);
        self
    }

    /// Sets the division of the decoder's layers among pipeline stages.
    #[must_use]
    pub fn with_split(mut self, split: PipelineSplit) -> Self {
        self.split = split;
        self
    }
}

impl fmt::Display for ParallelLayout {
    /// `TP2 PP4 EP1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TP{} PP{} EP{}", self.tp, self.pp, self.ep)?;
        if let Some(etp) = self.etp {
            write!(f, " ETP{etp}")?;
        }
        if let Some(chunks) = self.split.virtual_pipeline_model_parallel_size {
            write!(f, " VPP{chunks}")?;
        }
        self.dp.map_or(Ok(()), |dp| write!(f, " DP{dp}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_have_the_layers_that_megatron_gives_them() {
        let none = PipelineSplit::default();
        let set = |first, last, virtual_pipeline_model_parallel_size| PipelineSplit {
            decoder_first_pipeline_num_layers: first,
            decoder_last_pipeline_num_layers: last,
            virtual_pipeline_model_parallel_size,
            ..none
        };
        let counted = |embedding, loss, virtual_pipeline_model_parallel_size| PipelineSplit {
            account_for_embedding_in_pipeline_split: embedding,
            account_for_loss_in_pipeline_split: loss,
            virtual_pipeline_model_parallel_size,
            ..none
        };
        for (split, layers, stages, expected) in [
            (none, 5, 1, Some(vec![(5, 0)])),
            (none, 4, 2, Some(vec![(2, 0), (4, 1)])),
            (none, 5, 2, None),
            (set(Some(1), None, None), 5, 3, Some(vec![(1, 0), (3, 1), (5, 2)])),
            (set(None, Some(3), None), 5, 2, Some(vec![(2, 0), (5, 1)])),
            (set(Some(2), Some(3), None), 5, 2, Some(vec![(2, 0), (5, 1)])),
            (set(Some(2), Some(3), None), 6, 2, None),
            (set(Some(2), Some(2), None), 6, 3, Some(vec![(2, 0), (4, 1), (6, 2)])),
            (set(Some(7), None, None), 6, 2, None),
            (set(None, None, Some(2)), 8, 2, Some(vec![(2, 0), (4, 1), (6, 0), (8, 1)])),
            (set(Some(2), None, Some(2)), 6, 2, Some(vec![(1, 0), (3, 1), (4, 0), (6, 1)])),
            (set(Some(1), None, Some(2)), 5, 2, None),
            (counted(true, true, None), 4, 3, Some(vec![(1, 0), (3, 1), (4, 2)])),
            (counted(true, false, None), 3, 2, Some(vec![(1, 0), (3, 1)])),
            (counted(true, true, Some(2)), 6, 2, Some(vec![(1, 0), (3, 1), (5, 0), (6, 1)])),
            (set(None, None, Some(0)), 8, 2, None),
            (set(None, None, Some(u32::MAX)), 8, 2, None),
        ] {
            assert_eq!(split.ends(layers, stages), expected, "{split:?} of {layers} in {stages}");
        }
    }
}

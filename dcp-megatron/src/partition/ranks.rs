//! Rank numbers in a parallel layout.

use crate::error::MegatronError;
use crate::layout::{ParallelLayout, PipelineSplit};

/// The sizes of a layout, checked and complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ranks {
    pub(super) tp: u32,
    pub(super) pp: u32,
    pub(super) ep: u32,
    pub(super) etp: u32,
    /// Ranks of one pipeline stage.
    pub(super) stage: u32,
}

impl Ranks {
    /// The ranks of a layout.
    ///
    /// # Errors
    ///
    /// [`MegatronError::Layout`] when a size is 0, the ranks of a stage cannot be divided into
    /// groups for the experts, or there are more than [`dcp_jobs::reshard::MAX_RANKS`].
    pub(super) fn of(layout: ParallelLayout) -> Result<Self, MegatronError> {
        let bad = |problem: String| Err(MegatronError::Layout { layout, problem });
        let etp = layout.etp.unwrap_or(layout.tp);
        let sizes = [layout.tp, layout.pp, layout.ep, etp, layout.dp.unwrap_or(1)];
        if sizes.contains(&0) {
            return bad("no size can be 0".to_owned());
        }
        if layout.pp == 1 && layout.split != PipelineSplit::default() {
            return bad("its one pipeline stage has all layers, whatever is said of the first or \
                        last of several"
                .to_owned());
        }
        let [tp, pp, ep, etp, dp] = sizes.map(u64::from);
        let expert = etp * ep;
        let stage = match layout.dp {
            Some(_) => tp * dp,
            // The least common multiple: as few replicas as there can be.
            None => (tp / gcd(tp, expert)).saturating_mul(expert),
        };
        if stage % expert != 0 {
            return bad(format!(
                "its {stage} ranks of a stage cannot be divided into groups of {expert} that share \
                 the experts"
            ));
        }
        let world = stage.saturating_mul(pp);
        if world > u64::from(dcp_jobs::reshard::MAX_RANKS) {
            return bad(format!("{world} ranks are more than {}", dcp_jobs::reshard::MAX_RANKS));
        }
        let narrow = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        Ok(Self {
            tp: layout.tp,
            pp: layout.pp,
            ep: layout.ep,
            etp: narrow(etp),
            stage: narrow(stage),
        })
    }

    pub(super) fn world(self) -> u32 {
        self.stage.saturating_mul(self.pp)
    }

    /// The rank that writes the part `tp` of a dense layer in stage `pp`.
    pub(super) fn dense(self, tp: u32, pp: u32) -> u32 {
        tp + self.stage * pp
    }

    /// The rank that writes the part `etp` of an expert of group `ep` in stage `pp`.
    pub(super) fn expert(self, etp: u32, ep: u32, pp: u32) -> u32 {
        etp + self.etp * ep + self.stage * pp
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_numbered_as_megatron_numbers_them() {
        let ranks = Ranks::of(ParallelLayout::new(2, 2)).unwrap();
        assert_eq!(ranks.world(), 4);
        assert_eq!((ranks.dense(1, 0), ranks.dense(0, 1)), (1, 2));
        // TP2 EP4 ETP1 needs four ranks in a stage: two replicas of dense layers.
        let ranks = Ranks::of(ParallelLayout::new(2, 3).with_ep(4).with_etp(1)).unwrap();
        assert_eq!((ranks.stage, ranks.world()), (4, 12));
        assert_eq!(ranks.expert(0, 3, 2), 11);
        let ranks = Ranks::of(ParallelLayout::new(2, 1).with_ep(2)).unwrap();
        assert_eq!((ranks.stage, ranks.expert(1, 1, 0)), (4, 3));
        let ranks = Ranks::of(ParallelLayout::new(1, 1).with_ep(2).with_dp(4)).unwrap();
        assert_eq!(ranks.stage, 4);
    }

    #[test]
    fn senseless_layouts_are_refused() {
        for (layout, said) in [
            (ParallelLayout::new(0, 1), "0"),
            (ParallelLayout::new(1, 1).with_ep(0), "0"),
            (
                ParallelLayout::new(2, 1).with_split(PipelineSplit {
                    virtual_pipeline_model_parallel_size: Some(2),
                    ..PipelineSplit::default()
                }),
                "one pipeline stage",
            ),
            (ParallelLayout::new(2, 1).with_dp(3).with_ep(4).with_etp(1), "groups of 4"),
            (ParallelLayout::new(u32::MAX, u32::MAX), "more than"),
            (ParallelLayout::new(u32::MAX, 1).with_ep(u32::MAX), "more than"),
        ] {
            let error = Ranks::of(layout).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}

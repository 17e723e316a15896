//! How many ranks there are in each direction, and which rank is which.

use std::fmt;

use crate::error::MegatronError;

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
}

impl ParallelLayout {
    /// Tensor- and pipeline-parallel, without expert parallelism.
    #[must_use]
    pub fn new(tp: u32, pp: u32) -> Self {
        Self { tp, pp, ep: 1, etp: None, dp: None }
    }

    /// The same, with the experts of a layer shared by `ep` ranks.
    #[must_use]
    pub fn with_ep(mut self, ep: u32) -> Self {
        self.ep = ep;
        self
    }

    /// The same, with each expert shared by `etp` ranks.
    #[must_use]
    pub fn with_etp(mut self, etp: u32) -> Self {
        self.etp = Some(etp);
        self
    }

    /// The same, with `dp` replicas of dense layers.
    #[must_use]
    pub fn with_dp(mut self, dp: u32) -> Self {
        self.dp = Some(dp);
        self
    }

    /// The sizes, checked and complete.
    ///
    /// # Errors
    ///
    /// [`MegatronError::Layout`] when a size is 0, the ranks of a stage cannot be divided into
    /// groups for the experts, or there are more than [`dcp_convert::MAX_RANKS`].
    pub(super) fn resolve(self) -> Result<Ranks, MegatronError> {
        let bad = |problem: String| Err(MegatronError::Layout { layout: self, problem });
        let etp = self.etp.unwrap_or(self.tp);
        let sizes = [self.tp, self.pp, self.ep, etp, self.dp.unwrap_or(1)];
        if sizes.contains(&0) {
            return bad("no size can be 0".to_owned());
        }
        let [tp, pp, ep, etp, dp] = sizes.map(u64::from);
        let expert = etp * ep;
        let stage = match self.dp {
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
        if world > u64::from(dcp_convert::MAX_RANKS) {
            return bad(format!("{world} ranks are more than {}", dcp_convert::MAX_RANKS));
        }
        let narrow = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        Ok(Ranks { tp: self.tp, pp: self.pp, ep: self.ep, etp: narrow(etp), stage: narrow(stage) })
    }
}

impl fmt::Display for ParallelLayout {
    /// `TP2 PP4 EP1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TP{} PP{} EP{}", self.tp, self.pp, self.ep)?;
        if let Some(etp) = self.etp {
            write!(f, " ETP{etp}")?;
        }
        self.dp.map_or(Ok(()), |dp| write!(f, " DP{dp}"))
    }
}

/// A layout that makes sense.
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
        let ranks = ParallelLayout::new(2, 2).resolve().unwrap();
        assert_eq!(ranks.world(), 4);
        assert_eq!((ranks.dense(1, 0), ranks.dense(0, 1)), (1, 2));
        // TP2 EP4 ETP1 needs four ranks in a stage: two replicas of dense layers.
        let ranks = ParallelLayout::new(2, 3).with_ep(4).with_etp(1).resolve().unwrap();
        assert_eq!((ranks.stage, ranks.world()), (4, 12));
        assert_eq!(ranks.expert(0, 3, 2), 11);
        let ranks = ParallelLayout::new(2, 1).with_ep(2).resolve().unwrap();
        assert_eq!((ranks.stage, ranks.expert(1, 1, 0)), (4, 3));
        let ranks = ParallelLayout::new(1, 1).with_ep(2).with_dp(4).resolve().unwrap();
        assert_eq!(ranks.stage, 4);
    }

    #[test]
    fn senseless_layouts_are_refused() {
        for (layout, said) in [
            (ParallelLayout::new(0, 1), "0"),
            (ParallelLayout::new(1, 1).with_ep(0), "0"),
            (ParallelLayout::new(2, 1).with_dp(3).with_ep(4).with_etp(1), "groups of 4"),
            (ParallelLayout::new(u32::MAX, u32::MAX), "more than"),
            (ParallelLayout::new(u32::MAX, 1).with_ep(u32::MAX), "more than"),
        ] {
            let error = layout.resolve().unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}

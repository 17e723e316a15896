//! The names of the files in a folder of DeepSpeed.

/// The tracker in the folder of a run.
pub(crate) const LATEST: &str = "latest";
/// The tracker of universal folders.
pub(crate) const LATEST_UNIVERSAL: &str = "latest_universal";
/// The folder of the parameters of a universal checkpoint.
pub(crate) const UNIVERSAL: &str = "zero";
/// The file of a parameter's weights there.
pub(crate) const FP32: &str = "fp32.pt";
/// The file of the optimizer's settings there.
pub(crate) const OPTIMIZER_STATE: &str = "optimizer_state.pt";

const MODEL: &str = "_model_states.pt";
const OPTIMIZER: &str = "_optim_states.pt";

/// A file, by its name. Ranks are numbers of the name, whatever its digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FileName {
    /// The model states of a model-parallel rank; of stage 3, of one of its data-parallel ranks.
    Model { mp: u64, dp: Option<u64> },
    /// The optimizer of a data-parallel rank of a model-parallel rank.
    Optimizer { mp: u64, dp: u64 },
    /// The optimizer of an expert-parallel rank, without ZeRO.
    ExpertOptimizer { mp: u64, rank: u64 },
    /// The experts of number `expert` of a layer.
    Expert { layer: u64, expert: u64, mp: u64 },
    /// A layer of a pipeline, or the part of it that a tensor-parallel rank has.
    Layer { layer: u64, tp: Option<u64> },
    /// A name of this form with a number that no rank has.
    Absurd,
}

impl FileName {
    /// Parses a name; `None` for one of another form.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        if let Some(stem) = name.strip_suffix(OPTIMIZER) {
            return Self::optimizer(stem);
        }
        // Versions before 0.3.16 wrote no underscore.
        if let Some(stem) = name.strip_suffix("optim_states.pt").filter(|s| s.contains("mp_rank_"))
        {
            return Self::optimizer(stem);
        }
        if let Some(stem) = name.strip_suffix("-model_states.pt") {
            let rest = stem.strip_prefix("layer_")?;
            let (layer, tp) = match rest.split_once("-model_") {
                Some((layer, tp)) => (digits(layer)?, Some(digits(tp)?)),
                None => (digits(rest)?, None),
            };
            return Some(match (layer, tp) {
                (Some(layer), None) => Self::Layer { layer, tp: None },
                (Some(layer), Some(Some(tp))) => Self::Layer { layer, tp: Some(tp) },
                _ => Self::Absurd,
            });
        }
        let stem = name.strip_suffix(MODEL)?;
        if let Some(rest) = stem.strip_prefix("layer_") {
            let (layer, rest) = rest.split_once("_expert_")?;
            let (expert, mp) = rest.split_once("_mp_rank_")?;
            let numbers = (digits(layer)?, digits(expert)?, digits(mp)?);
            return Some(match numbers {
                (Some(layer), Some(expert), Some(mp)) => Self::Expert { layer, expert, mp },
                _ => Self::Absurd,
            });
        }
        if let Some(mp) = stem.strip_prefix("mp_rank_") {
            return Some(digits(mp)?.map_or(Self::Absurd, |mp| Self::Model { mp, dp: None }));
        }
        let (dp, mp) = stem.strip_prefix("zero_pp_rank_")?.split_once("_mp_rank_")?;
        Some(match (digits(dp)?, digits(mp)?) {
            (Some(dp), Some(mp)) => Self::Model { mp, dp: Some(dp) },
            _ => Self::Absurd,
        })
    }

    fn optimizer(stem: &str) -> Option<Self> {
        if let Some(rest) = stem.strip_prefix("expp_rank_") {
            let (rank, mp) = rest.split_once("_mp_rank_")?;
            return Some(match (digits(rank)?, digits(mp)?) {
                (Some(rank), Some(mp)) => Self::ExpertOptimizer { mp, rank },
                _ => Self::Absurd,
            });
        }
        let stem =
            stem.strip_prefix("bf16_").or_else(|| stem.strip_prefix("fp16_")).unwrap_or(stem);
        let (dp, mp) = stem.strip_prefix("zero_pp_rank_")?.split_once("_mp_rank_")?;
        Some(match (digits(dp)?, digits(mp)?) {
            (Some(dp), Some(mp)) => Self::Optimizer { mp, dp },
            _ => Self::Absurd,
        })
    }
}

/// The most that a rank, layer or expert is numbered.
const NUMBER_MAX: u64 = 1 << 24;

/// The number that digits are: `None` for other text, `Some(None)` for one that no rank has.
fn digits(text: &str) -> Option<Option<u64>> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok().filter(|number| *number <= NUMBER_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_deepspeed() {
        use FileName::{Absurd, Expert, ExpertOptimizer, Layer, Model, Optimizer};
        for (name, found) in [
            ("mp_rank_00_model_states.pt", Some(Model { mp: 0, dp: None })),
            ("zero_pp_rank_10_mp_rank_01_model_states.pt", Some(Model { mp: 1, dp: Some(10) })),
            ("zero_pp_rank_3_mp_rank_00_optim_states.pt", Some(Optimizer { mp: 0, dp: 3 })),
            ("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt", Some(Optimizer { mp: 0, dp: 3 })),
            ("zero_pp_rank_3_mp_rank_00optim_states.pt", Some(Optimizer { mp: 0, dp: 3 })),
            ("expp_rank_1_mp_rank_00_optim_states.pt", Some(ExpertOptimizer { mp: 0, rank: 1 })),
            (
                "layer_1_expert_3_mp_rank_00_model_states.pt",
                Some(Expert { layer: 1, expert: 3, mp: 0 }),
            ),
            ("layer_05-model_states.pt", Some(Layer { layer: 5, tp: None })),
            ("layer_05-model_01-model_states.pt", Some(Layer { layer: 5, tp: Some(1) })),
            ("mp_rank_99999999999999999999_model_states.pt", Some(Absurd)),
            ("zero_pp_rank_99999999_mp_rank_00_optim_states.pt", Some(Absurd)),
            ("mp_rank_x_model_states.pt", None),
            ("my_model_states.pt", None),
            ("mp_rank_+1_model_states.pt", None),
            ("model_optim_rng.pt", None),
            ("optim_states.pt", None),
        ] {
            assert_eq!(FileName::parse(name), found, "{name}");
        }
    }
}

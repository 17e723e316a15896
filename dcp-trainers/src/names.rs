//! Names of the files of ranks.

/// The number of ranks beyond which a number in a name is no rank.
const RANKS_MAX: u32 = 1 << 20;

/// The program that names files so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Program {
    /// verl and SkyRL.
    Verl,
    /// accelerate.
    Accelerate,
    /// `torch.distributed.checkpoint._experimental`.
    Torch,
}

impl Program {
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Verl => "verl",
            Self::Accelerate => "accelerate",
            Self::Torch => "torch's _experimental",
        }
    }
}

/// The state in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum State {
    Model,
    Optimizer,
    Extra,
    /// All of it, in one dict.
    Whole,
}

/// The name of a file of one rank, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RankName {
    pub(crate) program: Program,
    pub(crate) state: State,
    /// The number of the model or optimizer.
    pub(crate) index: u32,
    /// The number of ranks, where the name has it.
    pub(crate) world: Option<u32>,
    pub(crate) rank: u32,
}

impl RankName {
    /// Takes a name apart; `None` for a name of another form.
    ///
    /// # Errors
    ///
    /// For a name of this form with a number that is no rank or no number of ranks.
    pub(crate) fn parse(name: &str) -> Option<Result<Self, String>> {
        let (program, state, numbers) = parts(name)?;
        let is_digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        if !numbers.iter().flatten().all(|text| is_digits(text)) {
            return None;
        }
        let number = |text: &str| text.parse().ok().filter(|number| *number <= RANKS_MAX);
        let [index, world, rank] = numbers;
        let found = || {
            let index = index.map_or(Some(0), number)?;
            let world = match world {
                Some(world) => Some(number(world)?),
                None => None,
            };
            let rank = number(rank?)?;
            let fits = world.is_none_or(|world| rank < world);
            fits.then_some(Self { program, state, index, world, rank })
        };
        Some(
            found()
                .ok_or_else(|| format!("{name:?} has a number that no rank has; rename the file")),
        )
    }

    /// The name of the file of another rank.
    pub(crate) fn of_rank(self, rank: u32) -> String {
        let Self { program, state, index, world, .. } = self;
        match (program, state) {
            (Program::Torch, _) => format!("checkpoint_{rank}.pt"),
            (Program::Accelerate, State::Optimizer) => format!("optimizer_{index}_rank{rank}.bin"),
            (Program::Accelerate, _) => format!("pytorch_model_fsdp_{index}_rank{rank}.bin"),
            (Program::Verl, state) => {
                let world = world.unwrap_or_default();
                let start = match state {
                    State::Optimizer => "optim",
                    State::Extra => "extra_state",
                    _ => "model",
                };
                format!("{start}_world_size_{world}_rank_{rank}.pt")
            }
        }
    }

    /// The name of the state in the merged checkpoint; empty for all of it.
    pub(crate) fn root(self) -> String {
        let numbered = |name: &str| match self.index {
            0 => name.to_owned(),
            index => format!("{name}_{index}"),
        };
        match self.state {
            State::Model => numbered("model"),
            State::Optimizer => numbered("optimizer"),
            State::Extra => "extra_state".to_owned(),
            State::Whole => String::new(),
        }
    }
}

/// The program and the state of a name, and the texts of index, world and rank.
fn parts(name: &str) -> Option<(Program, State, [Option<&str>; 3])> {
    if let Some(rest) = name.strip_suffix(".pt") {
        if let Some(rank) = rest.strip_prefix("checkpoint_") {
            return Some((Program::Torch, State::Whole, [None, None, Some(rank)]));
        }
        let (start, rest) = rest.split_once("_world_size_")?;
        let (world, rank) = rest.split_once("_rank_")?;
        let state = match start {
            "model" => State::Model,
            "optim" => State::Optimizer,
            "extra_state" => State::Extra,
            _ => return None,
        };
        return Some((Program::Verl, state, [None, Some(world), Some(rank)]));
    }
    let rest = name.strip_suffix(".bin")?;
    let (state, rest) = match rest.strip_prefix("pytorch_model_fsdp_") {
        Some(rest) => (State::Model, rest),
        None => (State::Optimizer, rest.strip_prefix("optimizer_")?),
    };
    if let (State::Model, Some(rank)) = (state, rest.strip_prefix("rank")) {
        return Some((Program::Accelerate, state, [None, None, Some(rank)]));
    }
    let (index, rank) = rest.split_once("_rank")?;
    Some((Program::Accelerate, state, [Some(index), None, Some(rank)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart_and_made_again() {
        for name in [
            "model_world_size_4_rank_3.pt",
            "optim_world_size_16_rank_0.pt",
            "extra_state_world_size_2_rank_1.pt",
            "pytorch_model_fsdp_0_rank1.bin",
            "optimizer_1_rank0.bin",
            "checkpoint_7.pt",
        ] {
            let parsed = RankName::parse(name).unwrap().unwrap();
            assert_eq!(parsed.of_rank(parsed.rank), name);
        }
        assert_eq!(RankName::parse("pytorch_model_fsdp_rank3.bin").unwrap().unwrap().rank, 3);
    }

    #[test]
    fn other_names_are_none_and_huge_numbers_are_named() {
        for name in ["model.pt", "checkpoint_best.pt", "optimizer.bin", "pytorch_model_fsdp.bin"] {
            assert_eq!(RankName::parse(name), None, "{name}");
        }
        for name in [
            "model_world_size_99999999999999999999_rank_0.pt",
            "model_world_size_2_rank_4294967295.pt",
            "model_world_size_2_rank_2.pt",
            "model_world_size_0_rank_0.pt",
            "checkpoint_18446744073709551616.pt",
        ] {
            let error = RankName::parse(name).unwrap().unwrap_err();
            assert!(error.contains("no rank has"), "{error}");
        }
    }
}

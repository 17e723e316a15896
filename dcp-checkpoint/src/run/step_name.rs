//! The names of the folders of a run.

use dcp_megatron::Tracked;
use dcp_olmo::olmo_step;

/// How the folders of a run are named. Every name is recognized; a manager writes one of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StepNaming {
    /// `step-40`, as torchtitan names them.
    #[default]
    Dash,
    /// `step_40`.
    Underscore,
    /// `step40`, as OLMo-core names them.
    Plain,
    /// `iter_0000040` and the tracker file of the run, as Megatron-LM writes them.
    Iteration,
    /// `checkpoint-40`, as the trainer of Hugging Face's transformers names them.
    Checkpoint,
    /// `global_step40`, as DeepSpeed and veRL name them.
    GlobalStep,
}

/// The names that are a word and a number.
const WORDS: [(StepNaming, &str); 4] = [
    (StepNaming::Dash, "step-"),
    (StepNaming::Underscore, "step_"),
    (StepNaming::Checkpoint, "checkpoint-"),
    (StepNaming::GlobalStep, "global_step"),
];

impl StepNaming {
    /// The folder of a step.
    ///
    /// ```
    /// use dcp_checkpoint::run::StepNaming;
    ///
    /// assert_eq!(StepNaming::Iteration.folder(40), "iter_0000040");
    /// assert_eq!(StepNaming::parse("step40"), Some((StepNaming::Plain, 40)));
    /// ```
    #[must_use]
    pub fn folder(self, step: u64) -> String {
        match self {
            Self::Plain => format!("step{step}"),
            Self::Iteration => Tracked::Iteration(step).folder_name(),
            _ => {
                let word = WORDS.iter().find(|(naming, _)| *naming == self);
                format!("{}{step}", word.map_or("step-", |(_, word)| word))
            }
        }
    }

    /// The step that a folder of this name is the checkpoint of, and the naming; `None` for every
    /// other name, such as `llama-3-8b`.
    #[must_use]
    pub fn parse(name: &str) -> Option<(Self, u64)> {
        if let Some(Tracked::Iteration(step)) = Tracked::of_folder(name) {
            return Some((Self::Iteration, step));
        }
        if let Some(step) = olmo_step(name) {
            return Some((Self::Plain, step));
        }
        WORDS.iter().find_map(|(naming, word)| {
            let digits = name.strip_prefix(word)?;
            let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
            Some((*naming, digits.parse().ok().filter(|_| plain)?))
        })
    }

    /// The same for a folder that OLMo-core renames when its save is complete: `step40-tmp`.
    pub(super) fn parse_temporary(name: &str) -> Option<(Self, u64)> {
        Self::parse(name.strip_suffix("-tmp")?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_naming_reads_what_it_writes_and_no_other_does() {
        let all = [
            StepNaming::Dash,
            StepNaming::Underscore,
            StepNaming::Plain,
            StepNaming::Iteration,
            StepNaming::Checkpoint,
            StepNaming::GlobalStep,
        ];
        for naming in all {
            for step in [0, 7, 40, 12_345_678, u64::MAX] {
                assert_eq!(StepNaming::parse(&naming.folder(step)), Some((naming, step)));
            }
        }
    }

    #[test]
    fn names_that_only_end_in_a_number_are_no_steps() {
        for name in [
            "llama-3-8b",
            "model-7",
            "step",
            "step-",
            "step-4x",
            "step--4",
            "step-+4",
            "xstep-4",
            "Step-4",
            "step-4-tmp",
            "iter_40",
            "epoch=1-step=4.ckpt",
            "..",
            "step-99999999999999999999",
        ] {
            assert_eq!(StepNaming::parse(name), None, "{name}");
        }
        assert_eq!(StepNaming::parse_temporary("step4-tmp"), Some((StepNaming::Plain, 4)));
        assert_eq!(StepNaming::parse_temporary("tmp"), None);
    }
}

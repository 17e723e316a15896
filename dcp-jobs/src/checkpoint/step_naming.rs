//! The names of the folders of a run.

/// The naming of the folders of a run. Every name is recognized; a manager writes one of them.
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
    /// `iter_0000040`, as Megatron-LM names them. The tracker file that Megatron-LM reads is written where
    /// Megatron-Core is among the [frameworks](crate::Opener::frameworks) of the run.
    Iteration,
    /// `checkpoint-40`, as the trainer of Hugging Face's transformers names them.
    Checkpoint,
    /// `global_step40`, as DeepSpeed and veRL name them.
    GlobalStep,
}

/// The word before the number of [`StepNaming::Plain`].
const PLAIN: &str = "step";
/// The word before the number of [`StepNaming::Iteration`], and the digits that it has at least.
const ITERATION: &str = "iter_";
const ITERATION_DIGITS: usize = 7;

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
    /// use dcp_jobs::run::StepNaming;
    ///
    /// assert_eq!(StepNaming::Iteration.folder(40), "iter_0000040");
    /// assert_eq!(StepNaming::parse("step40"), Some((StepNaming::Plain, 40)));
    /// ```
    #[must_use]
    pub fn folder(self, step: u64) -> String {
        match self {
            Self::Plain => format!("{PLAIN}{step}"),
            Self::Iteration => format!("{ITERATION}{step:0width$}", width = ITERATION_DIGITS),
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
        if let Some(digits) = name.strip_prefix(ITERATION) {
            let step = number(digits).filter(|_| digits.len() >= ITERATION_DIGITS)?;
            return Some((Self::Iteration, step));
        }
        if let Some(step) = name.strip_prefix(PLAIN).and_then(number) {
            return Some((Self::Plain, step));
        }
        WORDS.iter().find_map(|(naming, word)| Some((*naming, number(name.strip_prefix(word)?)?)))
    }

    /// Whether a folder has the name of a step under which its save has not come to the end.
    pub(crate) fn is_temporary(name: &str) -> bool {
        name.starts_with(TEMPORARY_PREFIX) || name.ends_with("tmp")
    }

    /// The step in the name of a folder of any trainer, of a manager's naming or not; `None` where the
    /// name is not that of a step. Besides those that [`parse`](Self::parse) reads: folders that a save
    /// renames in the end (`step40-tmp`, `tmp-checkpoint-40`), `step40-unsharded` of OLMo, `ep1-ba40` of
    /// Composer, `epoch=1-step=40.ckpt` of Lightning, `global_step_40` of veRL, and `epoch_3`, where the
    /// number is that of the epoch.
    ///
    /// ```
    /// use dcp_jobs::run::StepNaming;
    ///
    /// assert_eq!(StepNaming::step_of("epoch=1-step=40.ckpt"), Some(40));
    /// assert_eq!(StepNaming::step_of("llama-3-8b"), None);
    /// ```
    #[must_use]
    pub fn step_of(name: &str) -> Option<u64> {
        let name = name.strip_prefix(TEMPORARY_PREFIX).unwrap_or(name);
        let name = SUFFIXES.iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
        if let Some((_, step)) = Self::parse(name) {
            return Some(step);
        }
        // Of fewer digits than Megatron-LM writes.
        let short = name.strip_prefix(ITERATION);
        let words = OTHER_WORDS.iter().filter_map(|word| name.strip_prefix(word)).chain(short);
        words.filter_map(number).next().or_else(|| composer(name)).or_else(|| lightning(name))
    }
}

/// The beginning of the name of a folder that transformers renames when the save is done.
const TEMPORARY_PREFIX: &str = "tmp-";
/// Endings that trainers and tools add to the name of a step.
const SUFFIXES: [&str; 5] = ["-unsharded-tmp", "-unsharded", "-tmp", "_tmp", ".tmp"];

/// Words before a number that no manager writes.
const OTHER_WORDS: [&str; 11] = [
    "global_step_",
    "global_step-",
    "global-step-",
    "checkpoint_",
    "ckpt-",
    "ckpt_",
    "iter-",
    "iteration-",
    "epoch-",
    "epoch_",
    "epoch",
];

fn number(digits: &str) -> Option<u64> {
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| plain)
}

/// The batch in `ep1-ba40`, which Composer names folders after.
fn composer(name: &str) -> Option<u64> {
    let (epoch, batch) = name.strip_prefix("ep")?.split_once("-ba")?;
    number(epoch)?;
    number(batch)
}

/// The step in `epoch=1-step=40.ckpt` and `epoch=1-step=40-val_loss=0.25-v1.ckpt`, as Lightning names
/// files and folders; the epoch where there is no step.
fn lightning(name: &str) -> Option<u64> {
    let name = name.strip_suffix(".ckpt").unwrap_or(name);
    let of = |wanted: &str| {
        let mut pairs = name.split('-').filter_map(|part| part.split_once('='));
        pairs.find_map(|(key, value)| number(value).filter(|_| key == wanted))
    };
    let is_first = name.starts_with("epoch=") || name.starts_with("step=");
    of("step").or_else(|| of("epoch")).filter(|_| is_first)
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
            "..",
            "step-99999999999999999999",
        ] {
            assert_eq!(StepNaming::parse(name), None, "{name}");
        }
    }

    #[test]
    fn names_of_every_trainer_are_steps_and_others_are_not() {
        for (name, step) in [
            ("step-7", 7),
            ("iter_0000040", 40),
            ("step4-tmp", 4),
            ("tmp-checkpoint-500", 500),
            ("step1000-unsharded", 1000),
            ("step1000-unsharded-tmp", 1000),
            ("global_step_20", 20),
            ("global_step20", 20),
            ("ep0-ba100", 100),
            ("epoch=3-step=500.ckpt", 500),
            ("epoch=3-step=500", 500),
            ("epoch=3-step=500-val_loss=0.25-v1.ckpt", 500),
            ("epoch=3-val_loss=0.25.ckpt", 3),
            ("step=9.ckpt", 9),
            ("epoch_2", 2),
            ("epoch-2", 2),
            ("epoch2", 2),
            ("checkpoint_30", 30),
            ("iter_40", 40),
            ("ckpt-8", 8),
        ] {
            assert_eq!(StepNaming::step_of(name), Some(step), "{name}");
        }
        for name in [
            "llama-3-8b",
            "model-7",
            "tmp",
            "-tmp",
            "step-",
            "step-4x",
            "ep1",
            "ep-ba4",
            "ba4",
            "epoch=",
            "epoch=x-step=y.ckpt",
            "last.ckpt",
            "val_loss=3",
            "release",
            "..",
            "latest",
            "step-99999999999999999999",
            "checkpoint",
            "epoch_2_best",
            "global_step_",
        ] {
            assert_eq!(StepNaming::step_of(name), None, "{name}");
        }
    }
}

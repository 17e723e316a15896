//! Results of recognizing a folder by its names.

use std::fmt;
use std::sync::Arc;

use crate::names::key::Key;
use crate::plans::metadata::CheckpointMetadata;

/// The names of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FormatInfo {
    /// For scripts: `dcp`, `huggingface`.
    pub name: &'static str,
    /// For people: `DCP`, `Hugging Face`.
    pub title: &'static str,
    /// Files of which every checkpoint of the format has at least one, under fixed names relative
    /// to its folder. A storage that cannot list looks these up.
    pub landmarks: &'static [&'static str],
    /// Endings of the names of files that may be checkpoints on their own, such as `.pt`.
    pub file_endings: &'static [&'static str],
    /// Whether its folders are Hugging Face models: a configuration and a tokenizer belong to the
    /// weights, and the weights may have variants.
    pub model_folders: bool,
}

impl FormatInfo {
    /// A format without landmarks.
    #[must_use]
    pub fn new(name: &'static str, title: &'static str) -> Self {
        Self { name, title, landmarks: &[], file_endings: &[], model_folders: false }
    }

    /// Sets the landmarks.
    #[must_use]
    pub fn with_landmarks(mut self, landmarks: &'static [&'static str]) -> Self {
        self.landmarks = landmarks;
        self
    }

    /// Sets the endings of files that may be checkpoints on their own.
    #[must_use]
    pub fn with_file_endings(mut self, endings: &'static [&'static str]) -> Self {
        self.file_endings = endings;
        self
    }

    /// Declares that folders of the format are Hugging Face models.
    #[must_use]
    pub fn with_model_folders(mut self) -> Self {
        self.model_folders = true;
        self
    }
}

/// The strength of the evidence in a folder's names. The strongest decides which format opens it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Evidence {
    /// Files that lie in folders of many kinds, such as a configuration without weights.
    Trace,
    /// Files each of which may be a checkpoint on its own, or of a program that no format reads; the
    /// folder is not opened, and whether it is whole is unknown.
    Loose,
    /// The folder of a run, whose checkpoints are in folders below it.
    Run,
    /// Files that could be read, but that no index makes a checkpoint.
    Files,
    /// Files of a save that did not finish.
    Remains,
    /// An index, or what else only a checkpoint of this format has.
    Index,
}

/// A folder as one format recognizes it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recognized {
    /// The evidence for that.
    pub evidence: Evidence,
    /// The predicate of a sentence about the folder: `is a PyTorch DCP checkpoint`.
    pub description: String,
    /// The reason why the checkpoint is incomplete, by names and lengths.
    pub problem: Option<String>,
    /// The folder below this one that holds what is opened; `None` where that is this one.
    pub inner: Option<String>,
}

impl Recognized {
    /// A folder that is complete by its names.
    #[must_use]
    pub fn new(evidence: Evidence, description: impl Into<String>) -> Self {
        Self { evidence, description: description.into(), problem: None, inner: None }
    }

    /// Sets the reason why the checkpoint is incomplete.
    #[must_use]
    pub fn with_problem(mut self, problem: Option<String>) -> Self {
        self.problem = problem;
        self
    }

    /// Sets the folder below that holds what is opened.
    #[must_use]
    pub fn with_inner(mut self, inner: Option<String>) -> Self {
        self.inner = inner;
        self
    }

    /// Whether this is a checkpoint, or the remains of one, and not a run or a trace.
    #[must_use]
    pub fn is_checkpoint(&self) -> bool {
        self.evidence >= Evidence::Files
    }
}

impl fmt::Display for Recognized {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.description)
    }
}

/// The result of a closer look at a checkpoint.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Examined {
    /// The reason why it is not whole.
    pub problem: Option<String>,
    /// Whether readers open the checkpoint itself all the same: only a part that nobody needs for that has
    /// the [problem](Self::problem), such as a variant of a model. It counts neither as complete nor as
    /// what a dead save left.
    pub opens: bool,
    /// The other program that it belongs to, where that shows only now, as the predicate of a sentence: no
    /// job opens it, and whether it is whole is unknown.
    pub unsupported: Option<String>,
    /// The name of the format that it belongs to instead, where that shows only now: this examination is then one
    /// of that format.
    pub format: Option<&'static str>,
    /// Whether the format has compared every file that its reader needs. A problem of another file in the folder
    /// then concerns a resume alone, and the checkpoint [opens](Self::opens).
    pub all_compared: bool,
    /// Files whose own headers the format has read and found to agree with them: nobody has to read these again.
    pub compared: Vec<Key>,
    /// The files that have the [problem](Self::problem), where the format neither names nor owns any of them: without
    /// them the checkpoint is complete, and it counts as that.
    pub strays: Vec<Key>,
    /// Whether the trainer may remove it when a later one is there, where it says so.
    pub ephemeral: Option<bool>,
    /// The version of the program that wrote it, where it says so.
    pub version: Option<String>,
    /// Its index, where the format has read it: whether its chunks cover their tensors is for the caller to
    /// say.
    pub index: Option<Arc<CheckpointMetadata>>,
}

/// The index and the files that were compared are not part of it.
impl PartialEq for Examined {
    fn eq(&self, other: &Self) -> bool {
        let facts = |one: &Self| {
            let one = one.clone();
            let outcome = (one.problem, one.opens, one.unsupported, one.format, one.all_compared);
            (outcome, one.strays, one.ephemeral, one.version)
        };
        facts(self) == facts(other)
    }
}

impl Eq for Examined {}

impl Examined {
    /// A checkpoint with this problem, if it has one.
    #[must_use]
    pub fn new(problem: Option<String>) -> Self {
        Self { problem, ..Self::default() }
    }

    /// A checkpoint of another program, with the predicate of a sentence that says so.
    #[must_use]
    pub fn of_other_program(description: impl Into<String>) -> Self {
        Self { unsupported: Some(description.into()), ..Self::default() }
    }

    /// Sets [`opens`](Self::opens).
    #[must_use]
    pub fn with_opens(mut self, opens: bool) -> Self {
        self.opens = opens;
        self
    }

    /// Sets [`format`](Self::format).
    #[must_use]
    pub fn with_format(mut self, format: Option<&'static str>) -> Self {
        self.format = format;
        self
    }

    /// Sets [`all_compared`](Self::all_compared).
    #[must_use]
    pub fn with_all_compared(mut self, all_compared: bool) -> Self {
        self.all_compared = all_compared;
        self
    }

    /// Sets [`compared`](Self::compared).
    #[must_use]
    pub fn with_compared(mut self, compared: Vec<Key>) -> Self {
        self.compared = compared;
        self
    }

    /// Sets [`strays`](Self::strays).
    #[must_use]
    pub fn with_strays(mut self, strays: Vec<Key>) -> Self {
        self.strays = strays;
        self
    }

    /// Whether it is complete: it has no problem, or only [`strays`](Self::strays) have one.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.unsupported.is_none() && (self.problem.is_none() || !self.strays.is_empty())
    }

    /// Sets [`ephemeral`](Self::ephemeral).
    #[must_use]
    pub fn with_ephemeral(mut self, ephemeral: Option<bool>) -> Self {
        self.ephemeral = ephemeral;
        self
    }

    /// Sets [`index`](Self::index).
    #[must_use]
    pub fn with_index(mut self, index: Option<Arc<CheckpointMetadata>>) -> Self {
        self.index = index;
        self
    }

    /// Sets [`version`](Self::version).
    #[must_use]
    pub fn with_version(mut self, version: Option<String>) -> Self {
        self.version = version;
        self
    }
}

/// The tracker in the folder of a run, which names the checkpoint that was saved last.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunTracker {
    /// The name of the tracker's file.
    pub file: &'static str,
    /// The folder that it names, or why it names none.
    pub folder: Result<String, String>,
    /// Folders of the run that are later than that, so that their saves did not finish; each with
    /// the reason.
    pub unfinished: Vec<(String, String)>,
}

impl RunTracker {
    /// A tracker that names `folder`, or the reason why it names none.
    #[must_use]
    pub fn new(file: &'static str, folder: Result<String, String>) -> Self {
        Self { file, folder, unfinished: Vec::new() }
    }

    /// Sets the folders whose saves did not finish, each with the reason.
    #[must_use]
    pub fn with_unfinished(mut self, unfinished: Vec<(String, String)>) -> Self {
        self.unfinished = unfinished;
        self
    }
}

/// The checkpoint of a run that is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunSelection {
    /// The predicate of a sentence about the folder: `is a run of Megatron-LM`.
    pub description: &'static str,
    /// The folder of the checkpoint, or why none can be opened.
    pub folder: Result<String, String>,
    /// The reason for the choice: `the last complete one`.
    pub reason: String,
    /// The file in the run that decides which one is opened, even where the folder itself could be
    /// opened, too.
    pub tracker: Option<&'static str>,
    /// The problem of that file.
    pub tracker_problem: Option<String>,
}

impl RunSelection {
    /// This folder of a run.
    #[must_use]
    pub fn new(
        description: &'static str,
        folder: Result<String, String>,
        reason: impl Into<String>,
    ) -> Self {
        let reason = reason.into();
        Self { description, folder, reason, tracker: None, tracker_problem: None }
    }

    /// Sets the file that decides, with the problem of that file.
    #[must_use]
    pub fn with_tracker(mut self, file: &'static str, problem: Option<String>) -> Self {
        self.tracker = Some(file);
        self.tracker_problem = problem;
        self
    }
}

/// The sign that a save did not finish, where another format can read the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnfinishedSave {
    /// The file that is missing.
    pub file: &'static str,
    /// The predicate of a sentence about the folder.
    pub description: String,
    /// The remedy where the file alone was lost.
    pub remedy: String,
    /// Whether only a save of this format leaves such a folder. Otherwise it may as well be a whole checkpoint of the
    /// other format beside a file of such a name, and is not deleted as what a dead save left.
    pub certain: bool,
}

impl UnfinishedSave {
    /// A save without this last file.
    #[must_use]
    pub fn new(
        file: &'static str,
        description: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let (description, remedy) = (description.into(), remedy.into());
        Self { file, description, remedy, certain: true }
    }

    /// Sets [`certain`](Self::certain).
    #[must_use]
    pub fn with_certain(mut self, certain: bool) -> Self {
        self.certain = certain;
        self
    }
}

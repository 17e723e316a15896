//! What a folder of a training run is, told by the names in it alone: a checkpoint of which
//! trainer, and whether its save was finished.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use dcp_core::{FormatError, Key};
use serde::Deserialize;

use crate::dcp::names::Named;
use crate::hf::{CONFIG_ASIDE, INDEX_ENDING, UNFINISHED_NAME};

/// Folders with a checkpoint in them that are remembered below one folder.
const NESTED_MAX: usize = 64;
/// How deep a checkpoint is looked for below the folder.
const DEPTH_MAX: usize = 3;
/// Series of shards (`model-00001-of-00004.safetensors`) that are told apart in one folder.
const SERIES_MAX: usize = 64;
/// Shards of one series that are counted.
const SHARDS_MAX: u32 = 1 << 16;
/// Ranks whose files are remembered.
const RANKS_MAX: usize = 1 << 16;

/// The folder of OLMo-core's (3.0) checkpoints that is a DCP checkpoint.
pub const OLMO_MODEL: &str = "model_and_optim";
/// What dcp-megatron writes before it replaces the files of a checkpoint, and removes afterwards.
const MEGATRON_RECORD: &str = ".dcp-commit";
/// What OLMo-core (3.0) writes last.
pub const OLMO_COMMIT: &str = ".metadata.json";
/// The trainer's state of rank 0 in a checkpoint of OLMo-core (3.0).
pub const OLMO_TRAIN: &str = "train/rank0.pt";

/// What a folder is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FolderKind {
    /// A step of an OLMo-core run: `train/`, `model_and_optim/`, `.metadata.json`.
    OlmoStep,
    /// A checkpoint of PyTorch's DCP.
    Dcp,
    /// A checkpoint of Megatron-Core's `dist_checkpointing`, or of Megatron-LM before it.
    Megatron,
    /// Files of safetensors, as Hugging Face's libraries write them.
    HuggingFace,
    /// Files of `torch.save` with weights, of which `pytorch_model.bin` is the best known.
    TorchSave,
}

impl FolderKind {
    /// A short name for scripts, such as `olmo`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::OlmoStep => "olmo",
            Self::Dcp => "dcp",
            Self::Megatron => "megatron",
            Self::HuggingFace => "huggingface",
            Self::TorchSave => "torch_save",
        }
    }
}

impl fmt::Display for FolderKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OlmoStep => "OLMo step",
            Self::Dcp => "DCP",
            Self::Megatron => "Megatron",
            Self::HuggingFace => "Hugging Face",
            Self::TorchSave => "torch.save",
        })
    }
}

/// What is said of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verdict {
    /// What it is.
    pub kind: FolderKind,
    /// Why it is not whole, as far as names tell; `None` when they are all there.
    pub problem: Option<String>,
    /// Where below the folder the DCP checkpoint lies; `None` when it is the folder itself, or
    /// there is none.
    pub inner: Option<String>,
}

/// The names in one folder, as far as they matter. It takes a bounded amount of memory however
/// many there are.
#[derive(Clone, Debug, Default)]
pub struct FolderNames {
    dcp: DcpNames,
    olmo: OlmoNames,
    hugging_face: HuggingFaceNames,
    megatron: MegatronNames,
    torch_files: u64,
    /// DCP checkpoints further down, by folder.
    nested: BTreeMap<String, DcpNames>,
}

#[derive(Clone, Debug, Default)]
struct DcpNames {
    metadata: bool,
    metadata_tmp: bool,
    data: bool,
    ranks: BTreeSet<u32>,
}

#[derive(Clone, Debug, Default)]
struct OlmoNames {
    folder: bool,
    commit: bool,
    train_of_rank0: bool,
}

#[derive(Clone, Debug, Default)]
struct HuggingFaceNames {
    /// A file that no number is in.
    single: bool,
    /// `model.safetensors`.
    main: bool,
    index: bool,
    config: bool,
    /// What a writer that replaces a model keeps until it is done.
    config_aside: bool,
    /// What a writer keeps until all files are there.
    unfinished: bool,
    /// Shards seen of `STEM-00001-of-00004.safetensors`, by stem and number of shards.
    series: BTreeMap<(String, u32), BTreeSet<u32>>,
}

#[derive(Clone, Debug, Default)]
struct MegatronNames {
    /// `common.pt`.
    common: bool,
    /// `integrity.json`.
    integrity: bool,
    /// `metadata.json`.
    index: bool,
    /// What stands for it while a checkpoint is replaced.
    record: bool,
    /// An array of zarr.
    arrays: bool,
    rank_folders: bool,
}

impl DcpNames {
    fn add(&mut self, named: Named) {
        match named {
            Named::Metadata => self.metadata = true,
            Named::MetadataTmp => self.metadata_tmp = true,
            Named::Data { .. } => self.data = true,
            Named::RankMetadata { rank } if self.ranks.len() < RANKS_MAX => {
                self.ranks.insert(rank);
            }
            _ => {}
        }
    }

    fn is_any(&self) -> bool {
        self.is_committed() || self.metadata_tmp || self.data
    }

    fn is_committed(&self) -> bool {
        self.metadata || !self.ranks.is_empty()
    }

    fn problem(&self) -> Option<String> {
        if self.metadata {
            return None;
        }
        if !self.ranks.is_empty() {
            let absent = (0..).zip(&self.ranks).find(|(expected, rank)| expected != *rank);
            return absent.map(|(rank, _)| format!("the metadata of rank {rank} is missing"));
        }
        Some(if self.metadata_tmp {
            "there is a .metadata.tmp but no .metadata: the save died in its last step".to_owned()
        } else {
            "there is no .metadata: the save did not finish".to_owned()
        })
    }
}

impl FolderNames {
    /// Nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the name of a file, relative to the folder: `model_and_optim/.metadata`.
    pub fn add(&mut self, name: &str) {
        let Some((folder, file)) = name.rsplit_once('/') else {
            self.add_top(name);
            return;
        };
        let named = Key::new(file).ok().and_then(|file| Named::parse(&file));
        let first = folder.split('/').next().unwrap_or(folder);
        if folder == OLMO_MODEL {
            self.olmo.folder = true;
        }
        if name == OLMO_TRAIN {
            self.olmo.train_of_rank0 = true;
        }
        if first.starts_with("mp_rank_") && is_torch_file(file) {
            self.megatron.rank_folders = true;
        }
        if file == ".zarray" && first == folder {
            self.megatron.arrays = true;
        }
        let Some(named) = named else { return };
        if folder.split('/').count() <= DEPTH_MAX {
            if let Some(nested) = self.nested.get_mut(folder) {
                nested.add(named);
            } else if self.nested.len() < NESTED_MAX {
                self.nested.entry(folder.to_owned()).or_default().add(named);
            }
        }
    }

    fn add_top(&mut self, name: &str) {
        if let Some(named) = Key::new(name).ok().and_then(|name| Named::parse(&name)) {
            self.dcp.add(named);
        }
        match name {
            OLMO_COMMIT => self.olmo.commit = true,
            "common.pt" => self.megatron.common = true,
            "integrity.json" => self.megatron.integrity = true,
            "metadata.json" => self.megatron.index = true,
            MEGATRON_RECORD => self.megatron.record = true,
            "model.safetensors" => self.hugging_face.main = true,
            "config.json" => self.hugging_face.config = true,
            CONFIG_ASIDE => self.hugging_face.config_aside = true,
            UNFINISHED_NAME => self.hugging_face.unfinished = true,
            _ if name.ends_with(INDEX_ENDING) => self.hugging_face.index = true,
            _ => {}
        }
        if let Some(stem) = name.strip_suffix(".safetensors") {
            self.hugging_face.add(stem);
        }
        // SidecarFiles weights, trainers leave the state of all else in files of torch.save.
        let beside = ["optimizer", "scheduler", "rng_state", "training_args", "common", "scaler"];
        if is_torch_file(name) && !beside.iter().any(|other| name.starts_with(other)) {
            self.torch_files += 1;
        }
    }

    /// What the folder, whose own name is `name`, is; `None` when it is no checkpoint.
    #[must_use]
    pub fn verdict(&self, name: &str) -> Option<Verdict> {
        let plain = |kind, problem| Some(Verdict { kind, problem, inner: None });
        let model = self.nested.get(OLMO_MODEL);
        if self.olmo.folder || self.olmo.commit && olmo_step(name).is_some() {
            let problem = self.olmo_problem(name, model);
            let inner = model.is_some_and(DcpNames::is_committed).then(|| OLMO_MODEL.to_owned());
            return Some(Verdict { kind: FolderKind::OlmoStep, problem, inner });
        }
        if let Some(problem) = self.megatron_problem() {
            return plain(FolderKind::Megatron, problem);
        }
        if self.dcp.is_any() {
            return plain(FolderKind::Dcp, self.dcp.problem());
        }
        if self.hugging_face.is_any() {
            return plain(FolderKind::HuggingFace, self.hugging_face.problem());
        }
        // Of several, such as model and optimizer in folders of their own, the first is named.
        let committed = self.nested.iter().find(|(_, names)| names.is_committed());
        if let Some((folder, names)) = committed.or_else(|| self.nested.iter().next()) {
            let open = self
                .nested
                .iter()
                .find_map(|(folder, names)| Some(format!("{folder}: {}", names.problem()?)));
            let inner = names.is_committed().then(|| folder.clone());
            return Some(Verdict { kind: FolderKind::Dcp, problem: open, inner });
        }
        (self.torch_files > 0).then_some(())?;
        plain(FolderKind::TorchSave, None)
    }

    /// What a checkpoint of Megatron lacks; `None` when it is none. Since Megatron-Core 0.19 there
    /// is no `common.pt`, and a save that did not finish looks as one of PyTorch does, but for the
    /// `integrity.json` that may be there.
    fn megatron_problem(&self) -> Option<Option<String>> {
        let MegatronNames { common, integrity, index, record, arrays, rank_folders } =
            self.megatron;
        // With the record, what is there is read as it was or as it will be.
        let index = index || record && self.dcp.is_committed();
        let data = self.dcp.is_any() || arrays;
        if index && (common || data) {
            let unfinished = self.dcp.is_any() && !self.dcp.is_committed();
            return Some(self.dcp.problem().filter(|_| unfinished));
        }
        if common && data || integrity && self.dcp.is_any() {
            let problem = "there is no metadata.json: the save did not finish";
            return Some(Some(problem.to_owned()));
        }
        rank_folders.then_some(None)
    }

    /// As `dir_is_checkpoint` of OLMo-core (3.0), which wants all three files and looks into none.
    fn olmo_problem(&self, name: &str, model: Option<&DcpNames>) -> Option<String> {
        if !model.is_some_and(|model| model.metadata) {
            let mut problem =
                format!("there is no {OLMO_MODEL}/.metadata: the save did not finish");
            if self.olmo.commit {
                // It is written when an asynchronous save ends, however it ends.
                problem.push_str(&format!(", although there is a {OLMO_COMMIT}"));
            }
            return Some(problem);
        }
        if !self.olmo.train_of_rank0 {
            return Some(format!("there is no {OLMO_TRAIN}"));
        }
        if !self.olmo.commit {
            return Some(format!("there is no {OLMO_COMMIT}: not committed, or being removed"));
        }
        name.ends_with("-tmp").then(|| "it was never renamed to its final name".to_owned())
    }
}

impl HuggingFaceNames {
    fn add(&mut self, stem: &str) {
        let shard = stem.rsplit_once("-of-").and_then(|(front, of)| {
            let (name, number) = front.rsplit_once('-')?;
            Some((name, number.parse::<u32>().ok()?, of.parse::<u32>().ok()?))
        });
        let Some((name, number, of)) = shard.filter(|(_, _, of)| *of <= SHARDS_MAX) else {
            self.single = true;
            return;
        };
        let known = self.series.len();
        let key = (name.to_owned(), of);
        if known < SERIES_MAX || self.series.contains_key(&key) {
            self.series.entry(key).or_default().insert(number);
        }
    }

    fn is_any(&self) -> bool {
        self.single || self.index || !self.series.is_empty()
    }

    fn problem(&self) -> Option<String> {
        if self.config_aside && !self.config {
            return Some(format!(
                "there is a {CONFIG_ASIDE}: a writer died while it replaced the model"
            ));
        }
        if self.unfinished && !self.index {
            let problem = "and no index: the model was not written to its end";
            return Some(format!("there is a {UNFINISHED_NAME}, {problem}"));
        }
        if self.main {
            // Loaders take it, whatever lies beside it.
            return None;
        }
        for ((name, of), found) in &self.series {
            if let Some(absent) = (1..=*of).find(|number| !found.contains(number)) {
                return Some(format!("{name}-{absent:05}-of-{of:05}.safetensors is missing"));
            }
        }
        if self.index {
            let nothing = !self.single && self.series.is_empty();
            return nothing.then(|| "the index is there, but no safetensors file".to_owned());
        }
        // Of what the ranks hold there is no index.
        let promises = self.series.keys().any(|(name, _)| !name.starts_with("shard-"));
        promises.then(|| "there is no index: the model was not written to its end".to_owned())
    }
}

fn is_torch_file(name: &str) -> bool {
    [".pt", ".pth", ".bin", ".ckpt"].iter().any(|ending| name.ends_with(ending))
}

/// The step of a folder that OLMo-core (3.0) takes for a checkpoint by its name, `step{N}`.
#[must_use]
pub fn olmo_step(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step")?;
    let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    digits.parse().ok().filter(|_| plain)
}

/// What OLMo-core (3.0) notes about a checkpoint in its `.metadata.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct OlmoNote {
    /// Whether the trainer may remove it when a later one is there.
    #[serde(default)]
    pub ephemeral: bool,
    /// The version of OLMo-core that wrote it.
    #[serde(default)]
    pub version: Option<String>,
}

impl OlmoNote {
    /// More bytes than any of these files has; a longer one is not worth reading.
    pub const BYTES_MAX: u64 = 64 << 10;

    /// Reads a `.metadata.json`.
    ///
    /// # Errors
    ///
    /// When it is not a JSON object of this form.
    pub fn parse(json: &[u8]) -> Result<Self, FormatError> {
        serde_json::from_slice(json)
            .map_err(|error| FormatError::new(OLMO_COMMIT, error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(folder: &str, names: &[&str]) -> Option<(FolderKind, bool, Option<String>)> {
        let mut facts = FolderNames::new();
        names.iter().for_each(|name| facts.add(name));
        facts.verdict(folder).map(|v| (v.kind, v.problem.is_none(), v.inner))
    }

    fn problem(folder: &str, names: &[&str]) -> String {
        let mut facts = FolderNames::new();
        names.iter().for_each(|name| facts.add(name));
        facts.verdict(folder).unwrap().problem.unwrap()
    }

    const OLMO: [&str; 5] = [
        ".metadata.json",
        "config.json",
        "model_and_optim/.metadata",
        "model_and_optim/__0_0.distcp",
        "train/rank0.pt",
    ];

    #[test]
    fn olmo_steps_need_all_three() {
        let inner = Some("model_and_optim".to_owned());
        let whole = Some((FolderKind::OlmoStep, true, inner.clone()));
        assert_eq!(verdict("step10", &OLMO), whole);
        for (without, said) in [
            ("model_and_optim/.metadata", "although there is a .metadata.json"),
            ("train/rank0.pt", "no train/rank0.pt"),
            (".metadata.json", "not committed"),
        ] {
            let rest: Vec<_> = OLMO.into_iter().filter(|name| *name != without).collect();
            assert!(problem("step10", &rest).contains(said), "{without}");
        }
        // A configuration is written after the commit, and so is no part of it.
        let rest: Vec<_> = OLMO.into_iter().filter(|name| *name != "config.json").collect();
        assert_eq!(verdict("step10", &rest), whole);
        assert!(problem("step10-tmp", &OLMO).contains("never renamed"));
        assert!(problem("step10", &[".metadata.json"]).contains("although"));
        assert_eq!(verdict("logs", &[".metadata.json"]), None);
    }

    #[test]
    fn notes_are_read() {
        let json = include_bytes!("../../fixtures/olmo/trainer/step3/.metadata.json");
        let note = OlmoNote::parse(json).unwrap();
        assert_eq!((note.ephemeral, note.version.as_deref()), (true, Some("3.0.0")));
        assert_eq!(OlmoNote::parse(b"{}").unwrap(), OlmoNote::default());
        assert!(OlmoNote::parse(b"[1]").is_err());
        assert!(OlmoNote::parse(&[b'['; 60_000]).is_err());
    }

    #[test]
    fn steps_are_plain_numbers() {
        for (name, step) in [
            ("step0", Some(0)),
            ("step007", Some(7)),
            ("step", None),
            ("step+1", None),
            ("step1-unsharded", None),
            ("astep1", None),
            ("step99999999999999999999", None),
        ] {
            assert_eq!(olmo_step(name), step, "{name}");
        }
    }

    #[test]
    fn checkpoints_of_other_trainers() {
        use FolderKind::{Dcp, HuggingFace, Megatron, TorchSave};
        let cases: [(&[&str], _); 14] = [
            (&[".metadata", "__0_0.distcp"], Some((Dcp, true, None))),
            (&["__0_0.distcp"], Some((Dcp, false, None))),
            (&[".metadata.tmp", "__0_0.distcp"], Some((Dcp, false, None))),
            (&["__0.metadata", "__1.metadata"], Some((Dcp, true, None))),
            (&["__0.metadata", "__2.metadata"], Some((Dcp, false, None))),
            (
                &["trainer_state.json", "pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"],
                Some((Dcp, true, Some("optimizer_0".to_owned()))),
            ),
            (&["metadata.json", "common.pt", ".metadata"], Some((Megatron, true, None))),
            (&["metadata.json", "common.pt", "__0_0.distcp"], Some((Megatron, false, None))),
            (&["common.pt", ".metadata", "__0_0.distcp"], Some((Megatron, false, None))),
            (&["mp_rank_00/model_optim_rng.pt"], Some((Megatron, true, None))),
            (&["model.safetensors", "optimizer.pt"], Some((HuggingFace, true, None))),
            (&["pytorch_model.bin", "config.json"], Some((TorchSave, true, None))),
            (&["events.out", "wandb/run.log", "a/b/c/d/e/.metadata"], None),
            (&["optimizer.pt", "rng_state_0.pth"], None),
        ];
        for (names, expected) in cases {
            assert_eq!(verdict("x", names), expected, "{names:?}");
        }
    }

    #[test]
    fn a_missing_shard_is_named() {
        let shards = ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"];
        assert_eq!(problem("x", &shards), "model-00002-of-00003.safetensors is missing");
        assert!(problem("x", &["model.safetensors.index.json"]).contains("no safetensors file"));
        let hostile = ["a-1-of-4294967295.safetensors"];
        assert_eq!(verdict("x", &hostile), Some((FolderKind::HuggingFace, true, None)));
    }

    #[test]
    fn a_model_that_was_not_written_to_its_end_is_not_whole() {
        let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
        assert!(problem("x", &shards).contains("no index"));
        let whole = Some((FolderKind::HuggingFace, true, None));
        let with = |name| [shards[0], shards[1], name];
        assert_eq!(verdict("x", &with("model.safetensors.index.json")), whole);
        assert_eq!(verdict("x", &with("model.safetensors")), whole);
        assert_eq!(verdict("x", &["shard-00001-model-00001-of-00001.safetensors"]), whole);
        assert!(problem("x", &["model.safetensors", CONFIG_ASIDE]).contains("died"));
        let chunk = ["chunk-00000.safetensors", UNFINISHED_NAME];
        assert!(problem("x", &chunk).contains("not written to its end"));
        let indexed = [chunk[0], chunk[1], "model.safetensors.index.json"];
        assert_eq!(verdict("x", &indexed), whole);
        assert_eq!(verdict("x", &["model.safetensors", "config.json", CONFIG_ASIDE]), whole);
    }

    #[test]
    fn a_checkpoint_of_megatron_is_committed_by_its_metadata_json() {
        let verdict = |names: &[&str]| {
            let mut facts = FolderNames::new();
            names.iter().for_each(|name| facts.add(name));
            facts.verdict("iter_0000010").map(|verdict| (verdict.kind, verdict.problem.is_none()))
        };
        let data = ["__0_0.distcp", ".metadata"];
        let with = |more: &[&'static str]| [&data, more].concat();
        let megatron = |whole| Some((FolderKind::Megatron, whole));
        assert_eq!(verdict(&with(&["common.pt", "metadata.json"])), megatron(true));
        assert_eq!(verdict(&with(&["metadata.json"])), megatron(true));
        assert_eq!(verdict(&with(&["common.pt"])), megatron(false));
        assert_eq!(verdict(&with(&["integrity.json"])), megatron(false));
        assert_eq!(verdict(&["common.pt", "metadata.json", "__0_0.distcp"]), megatron(false));
        assert_eq!(verdict(&["common.pt", "metadata.json", "w/.zarray"]), megatron(true));
        assert_eq!(verdict(&["common.pt", "w/.zarray", "w/0"]), megatron(false));
        assert_eq!(verdict(&["mp_rank_00_000/model_optim_rng.pt"]), megatron(true));
        assert_eq!(verdict(&data), Some((FolderKind::Dcp, true)));
    }

    #[test]
    fn any_number_of_names_takes_little() {
        let mut facts = FolderNames::new();
        for n in 0..100_000 {
            facts.add(&format!("d{n}/.metadata"));
            facts.add(&format!("m{n}-1-of-9.safetensors"));
            facts.add(&format!("__{n}.metadata"));
        }
        assert_eq!(facts.nested.len(), NESTED_MAX);
        assert_eq!(facts.hugging_face.series.len(), SERIES_MAX);
        assert_eq!(facts.dcp.ranks.len(), RANKS_MAX);
    }
}

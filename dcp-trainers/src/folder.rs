//! Finds the files of ranks in a folder, and those that are missing.

use std::collections::{BTreeMap, BTreeSet};

use dcp_core::format::Folder;
use dcp_core::text::counted;

use crate::names::{Program, RankName, State};

/// The file in which verl says how many ranks saved a folder.
pub(crate) const WORLD_FILE: &str = "fsdp_config.json";
/// The most bytes of it that are read.
pub(crate) const WORLD_FILE_MAX: u64 = 4096;
/// The folder with the configuration and tokenizer of the model.
pub(crate) const MODEL_FOLDER: &str = "huggingface";

/// Roles of verl and SkyRL, the one first that a step is opened at.
const ROLES: [&str; 6] = ["actor", "policy", "critic", "ref", "rm", "reward"];
/// The beginning of the name of a step's folder.
pub(crate) const STEP: &str = "global_step_";

/// The step that a folder's name has.
pub(crate) fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(STEP)?;
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

/// The files of one kind, by rank.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    /// The name of the first rank's file.
    pub(crate) name: RankName,
    pub(crate) files: BTreeMap<u32, String>,
}

/// The files of ranks in a folder.
#[derive(Clone, Debug)]
pub(crate) struct RankFolder {
    pub(crate) program: Program,
    pub(crate) world: u32,
    pub(crate) groups: Vec<Group>,
    /// The reason that it is not whole, by names alone.
    pub(crate) problem: Option<String>,
    pub(crate) notes: Vec<String>,
}

/// The number of ranks in a `fsdp_config.json`.
fn world_in(json: &[u8]) -> Option<u32> {
    let json: serde_json::Value = serde_json::from_slice(json).ok()?;
    u32::try_from(json.get("world_size")?.as_u64()?).ok()
}

impl RankFolder {
    /// Finds the files in a folder; `None` where there is none. Of files of several worlds those count that
    /// `fsdp_config.json` names, or else the only world with all files.
    pub(crate) fn find(folder: &Folder<'_>) -> Option<Self> {
        Self::with_config(folder, folder.peeked(WORLD_FILE).map(|json| &**json))
    }

    /// As [`find`](Self::find), with the bytes of a `fsdp_config.json`.
    pub(crate) fn with_config(folder: &Folder<'_>, config: Option<&[u8]>) -> Option<Self> {
        let (mut names, mut bad) = (BTreeMap::new(), None);
        for (name, _) in folder.files() {
            match RankName::parse(name) {
                Some(Ok(parsed)) => {
                    names.insert(parsed, name.to_owned());
                }
                Some(Err(problem)) => bad = bad.or(Some((name, problem))),
                None => {}
            }
        }
        if names.is_empty() {
            let (name, problem) = bad.filter(|(name, _)| !name.starts_with("checkpoint_"))?;
            let program = match name.ends_with(".bin") {
                true => Program::Accelerate,
                false => Program::Verl,
            };
            let (groups, notes) = (Vec::new(), Vec::new());
            return Some(Self { program, world: 0, groups, problem: Some(problem), notes });
        }
        let program = names.keys().next()?.program;
        names.retain(|name, _| name.program == program);
        let mut bad = bad.map(|(_, problem)| problem);
        let mut notes = Vec::new();
        let worlds: BTreeSet<_> = names.keys().filter_map(|name| name.world).collect();
        let named = config.map(world_in);
        if program == Program::Verl && named == Some(None) {
            bad = bad.or(Some(format!("{WORLD_FILE} cannot be read: it names no world size")));
        }
        let world = match named.flatten().filter(|_| program == Program::Verl) {
            Some(world) => world,
            None if worlds.len() > 1 => {
                let is_whole =
                    |world: &&u32| missing(&groups(&names, Some(**world)), **world).is_none();
                let whole: Vec<u32> = worlds.iter().filter(is_whole).copied().collect();
                let [only] = *whole else {
                    let worlds: Vec<_> = worlds.iter().map(ToString::to_string).collect();
                    let problem = format!(
                        "there are files of {} ranks: files of one save have one world size; move the \
                         others away",
                        worlds.join(" and of ")
                    );
                    let groups = groups(&names, None);
                    return Some(Self { program, world: 0, groups, problem: Some(problem), notes });
                };
                only
            }
            None => worlds.first().copied().unwrap_or_else(|| {
                names.keys().map(|name| name.rank).max().unwrap_or(0).saturating_add(1)
            }),
        };
        let groups = groups(&names, worlds.first().map(|_| world));
        if worlds.len() > 1 {
            notes.push(format!("not reading files of other numbers of ranks than {world}"));
        }
        let problem = bad.or_else(|| missing(&groups, world)).or_else(|| {
            let rank_0 = names.keys().next()?.of_rank(0);
            groups.is_empty().then(|| format!("{WORLD_FILE} names {world} ranks, and there is no file of them, such as {rank_0}"))
        });
        Some(Self { program, world, groups, problem, notes })
    }

    /// The names of all files.
    pub(crate) fn files(&self) -> impl Iterator<Item = &str> {
        self.groups.iter().flat_map(|group| group.files.values().map(String::as_str))
    }
}

/// The files of each kind, of one world where names have it.
fn groups(names: &BTreeMap<RankName, String>, world: Option<u32>) -> Vec<Group> {
    let mut found: BTreeMap<(State, u32), Group> = BTreeMap::new();
    for (name, file) in names.iter().filter(|(name, _)| world.is_none() || name.world == world) {
        let group = found.entry((name.state, name.index));
        let group = group.or_insert_with(|| Group { name: *name, files: BTreeMap::new() });
        group.files.insert(name.rank, file.clone());
    }
    found.into_values().collect()
}

/// The first file that is missing.
fn missing(groups: &[Group], world: u32) -> Option<String> {
    groups.iter().find_map(|group| {
        let absent = (0..world).find(|rank| !group.files.contains_key(rank))?;
        let count = counted(group.files.len() as u64, "file");
        let name = group.name.of_rank(absent);
        Some(format!("{name} is missing: there is {count} of {world} ranks"))
    })
}

/// The folders of roles that have files of ranks, in the folder of a step: the one first that the step is opened at.
/// The folders of a run are steps, not roles.
pub(crate) fn roles_in(folder: &Folder<'_>) -> Vec<String> {
    let is_step = step_of(folder.name()).is_some();
    let is_role = |below: &Folder<'_>| is_step || ROLES.contains(&below.name());
    let roles = folder.folders().filter(is_role).filter(|below| {
        below.files().any(|(name, _)| {
            matches!(RankName::parse(name), Some(Ok(name)) if name.program == Program::Verl)
        })
    });
    let mut roles: Vec<_> = roles.map(|below| below.name().to_owned()).collect();
    roles.sort_by_key(|name| {
        (ROLES.iter().position(|role| role == name).unwrap_or(ROLES.len()), name.clone())
    });
    roles
}

//! The folders `mp_rank_TT[_PPP][_EEE]` and which rank each of them is of.

use std::collections::{BTreeMap, BTreeSet};

use dcp_core::Storage;
use futures_util::StreamExt as _;

use super::{MODEL_FILE, OPTIMIZER_FILE};
use crate::args::MegatronArgs;
use crate::error::MegatronError;

const PREFIX: &str = "mp_rank_";
/// More of them than any model was ever divided among.
const FOLDERS_MAX: usize = 1 << 14;

/// The folders of a checkpoint, by the numbers in their names.
#[derive(Debug)]
pub(crate) struct LegacyFolders {
    /// Numbers, the folder's name, and whether it holds the file of a distributed optimizer.
    all: BTreeMap<Vec<u32>, (String, bool)>,
}

/// Which folder is of which rank.
#[derive(Debug)]
pub(super) struct Grid {
    pub(super) tp: u32,
    pub(super) pp: u32,
    pub(super) ep: u32,
    places: Vec<Place>,
}

/// A folder and its rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) tp: u32,
    pub(super) pp: u32,
    pub(super) ep: u32,
    pub(super) folder: String,
    pub(super) has_optimizer: bool,
}

impl LegacyFolders {
    /// Those in `storage`; `None` where there is none with a model in it.
    pub(crate) async fn find(storage: &dyn Storage) -> Result<Option<Self>, MegatronError> {
        let (mut models, mut optimizers) = (BTreeMap::new(), BTreeSet::new());
        let mut objects = storage.list(None);
        while let Some(meta) = objects.next().await {
            let key = meta?.key;
            let Some((folder, file)) = key.as_str().split_once('/') else { continue };
            let Some(numbers) = numbers(folder) else { continue };
            if file == MODEL_FILE {
                models.insert(numbers, folder.to_owned());
            } else if file == OPTIMIZER_FILE {
                optimizers.insert(numbers);
            }
            if models.len() > FOLDERS_MAX {
                let problem = format!("there are more than {FOLDERS_MAX} folders like it");
                return Err(MegatronError::Legacy { folder: folder.to_owned(), problem });
            }
        }
        let all: BTreeMap<_, _> = models
            .into_iter()
            .map(|(numbers, folder)| {
                let has_optimizer = optimizers.contains(&numbers);
                (numbers, (folder, has_optimizer))
            })
            .collect();
        Ok((!all.is_empty()).then_some(Self { all }))
    }

    /// The folder with the lowest numbers.
    pub(super) fn first(&self) -> Result<&str, MegatronError> {
        let first = self.all.values().next().map(|(folder, _)| folder.as_str());
        first.ok_or_else(|| missing("mp_rank_00"))
    }

    /// Which rank each of them is of. Where a name has two numbers, `args` tell whether the second
    /// one is that of a pipeline stage, as it is where there is more than one, or of a group of
    /// experts.
    pub(super) fn grid(&self, args: Option<&MegatronArgs>) -> Result<Grid, MegatronError> {
        let size = |size: Option<u64>| size.unwrap_or(1);
        let stages = size(args.and_then(MegatronArgs::pipeline_model_parallel_size));
        let groups = size(args.and_then(MegatronArgs::expert_model_parallel_size));
        let of_experts = stages <= 1 && groups > 1;
        let mut parts = 0;
        let mut found = BTreeMap::new();
        for (numbers, (folder, has_optimizer)) in &self.all {
            if parts != 0 && parts != numbers.len() {
                let problem = "its name has another number of parts than those before it";
                return Err(MegatronError::Legacy {
                    folder: folder.clone(),
                    problem: problem.to_owned(),
                });
            }
            parts = numbers.len();
            let (tp, pp, ep) = match **numbers {
                [tp] => (tp, 0, 0),
                [tp, ep] if of_experts => (tp, 0, ep),
                [tp, pp] => (tp, pp, 0),
                [tp, pp, ep] => (tp, pp, ep),
                _ => continue,
            };
            found.insert((pp, ep, tp), (folder, *has_optimizer));
        }
        let most = |part: fn(&(u32, u32, u32)) -> u32| {
            found.keys().map(part).max().unwrap_or(0).saturating_add(1)
        };
        let (pp, ep, tp) = (most(|key| key.0), most(|key| key.1), most(|key| key.2));
        let mut places = Vec::with_capacity(found.len());
        for (stage, group, rank) in (0..pp).flat_map(|stage| {
            (0..ep).flat_map(move |group| (0..tp).map(move |rank| (stage, group, rank)))
        }) {
            let Some((folder, has_optimizer)) = found.get(&(stage, group, rank)) else {
                return Err(missing(&name(rank, stage, group, parts, of_experts)));
            };
            let (folder, has_optimizer) = ((*folder).clone(), *has_optimizer);
            places.push(Place { tp: rank, pp: stage, ep: group, folder, has_optimizer });
        }
        let said = args.and_then(MegatronArgs::tensor_model_parallel_size);
        if let Some(said) = said.filter(|said| *said != u64::from(tp)) {
            return Err(missing_ranks("tensor", tp, said));
        }
        if args.is_some() && stages != u64::from(pp) {
            return Err(missing_ranks("pipeline", pp, stages));
        }
        Ok(Grid { tp, pp, ep, places })
    }
}

impl Grid {
    /// All ranks: stage by stage, in each group of experts by group, tensor-parallel ranks next
    /// to each other.
    pub(super) fn places(&self) -> impl Iterator<Item = &Place> {
        self.places.iter()
    }

    /// The rank at a position among all of them.
    pub(super) fn place(&self, at: usize) -> Option<&Place> {
        self.places.get(at)
    }

    /// The folder of a rank.
    pub(super) fn folder(&self, tp: u32, pp: u32, ep: u32) -> String {
        let place = self.places.iter().find(|place| (place.tp, place.pp, place.ep) == (tp, pp, ep));
        place.map_or_else(|| format!("{PREFIX}{tp:02}"), |place| place.folder.clone())
    }
}

/// The numbers in a folder's name.
fn numbers(folder: &str) -> Option<Vec<u32>> {
    let parts: Option<Vec<u32>> =
        folder.strip_prefix(PREFIX)?.split('_').map(|part| part.parse().ok()).collect();
    parts.filter(|parts| (1..=3).contains(&parts.len()))
}

fn name(tp: u32, pp: u32, ep: u32, parts: usize, of_experts: bool) -> String {
    match parts {
        0 | 1 => format!("{PREFIX}{tp:02}"),
        2 => format!("{PREFIX}{tp:02}_{:03}", if of_experts { ep } else { pp }),
        _ => format!("{PREFIX}{tp:02}_{pp:03}_{ep:03}"),
    }
}

fn missing(folder: &str) -> MegatronError {
    MegatronError::Legacy {
        folder: folder.to_owned(),
        problem: format!(
            "there is no {MODEL_FILE} in it, but there are folders of other ranks: bring it here"
        ),
    }
}

fn missing_ranks(direction: &str, found: u32, said: u64) -> MegatronError {
    MegatronError::Legacy {
        folder: format!("{PREFIX}*"),
        problem: format!(
            "there are folders of {found} {direction}-parallel ranks, and the arguments in them say \
             {said}: bring all of them here"
        ),
    }
}

#[cfg(test)]
mod tests {
    use dcp_core::{Dict, Value};

    use super::*;

    fn folders(names: &[&str]) -> LegacyFolders {
        let all = names.iter().map(|name| (numbers(name).unwrap(), ((*name).to_owned(), false)));
        LegacyFolders { all: all.collect() }
    }

    fn args(tp: i64, pp: i64, ep: i64) -> MegatronArgs {
        let args = Dict::from([
            ("tensor_model_parallel_size", tp),
            ("pipeline_model_parallel_size", pp),
            ("expert_model_parallel_size", ep),
        ]);
        MegatronArgs::from_value(&Value::Dict(args)).unwrap()
    }

    #[test]
    fn names_tell_ranks() {
        let grid = folders(&["mp_rank_00", "mp_rank_01"]).grid(None).unwrap();
        assert_eq!((grid.tp, grid.pp, grid.ep), (2, 1, 1));
        let two = ["mp_rank_00_000", "mp_rank_00_001"];
        let grid = folders(&two).grid(Some(&args(1, 2, 1))).unwrap();
        assert_eq!((grid.tp, grid.pp, grid.ep), (1, 2, 1));
        let grid = folders(&two).grid(Some(&args(1, 1, 2))).unwrap();
        assert_eq!((grid.tp, grid.pp, grid.ep), (1, 1, 2));
        let three = [
            "mp_rank_00_000_000",
            "mp_rank_00_000_001",
            "mp_rank_00_001_000",
            "mp_rank_00_001_001",
        ];
        let grid = folders(&three).grid(Some(&args(1, 2, 2))).unwrap();
        assert_eq!((grid.tp, grid.pp, grid.ep), (1, 2, 2));
        assert_eq!(grid.folder(0, 1, 0), "mp_rank_00_001_000");
        for other in ["mp_rank_", "mp_rank_x", "mp_rank_00_0_0_0", "rank_00", "mp_rank_-1"] {
            assert_eq!(numbers(other), None, "{other}");
        }
    }

    #[test]
    fn a_missing_folder_is_named() {
        let said = |names: &[&str], args: &MegatronArgs| {
            folders(names).grid(Some(args)).unwrap_err().to_string()
        };
        let error = said(&["mp_rank_00", "mp_rank_02"], &args(3, 1, 1));
        assert!(error.contains("mp_rank_01"), "{error}");
        let error = said(&["mp_rank_00"], &args(2, 1, 1));
        assert!(error.contains("1 tensor-parallel ranks") && error.contains("say 2"), "{error}");
        let error = said(&["mp_rank_00_000", "mp_rank_01_001"], &args(2, 2, 1));
        assert!(error.contains("mp_rank_01_000"), "{error}");
        let error = said(&["mp_rank_00", "mp_rank_00_000"], &args(1, 1, 1));
        assert!(error.contains("another number of parts"), "{error}");
    }
}

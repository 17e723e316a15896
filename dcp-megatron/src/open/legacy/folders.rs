//! Finds the folders `mp_rank_TT[_PPP][_EEE]` and the rank of each.

use std::collections::{BTreeMap, BTreeSet};

use dcp_core::Storage;
use futures_util::StreamExt as _;

use super::{MODEL_FILE, OPTIMIZER_FILE};
use crate::args::MegatronArgs;
use crate::error::MegatronError;

const PREFIX: &str = "mp_rank_";
/// More of them than any model was ever divided among.
const FOLDERS_MAX: usize = 1 << 14;
/// More ranks than one pipeline stage ever had.
const STAGE_MAX: u64 = 1 << 20;

/// The folders of a checkpoint, by the numbers in their names.
#[derive(Debug)]
pub(crate) struct LegacyFolders {
    /// Numbers, the folder's name, and whether it holds the file of a distributed optimizer.
    all: BTreeMap<Vec<u32>, (String, bool)>,
}

/// The folders by rank.
#[derive(Debug)]
pub(super) struct Grid {
    pub(super) tp: u32,
    pub(super) pp: u32,
    pub(super) ep: u32,
    /// Ranks that share each expert.
    pub(super) etp: u32,
    places: Vec<Place>,
}

/// A folder and its rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) tp: u32,
    pub(super) pp: u32,
    pub(super) ep: u32,
    /// The part of its experts that the rank has.
    pub(super) etp: u32,
    pub(super) folder: String,
    pub(super) has_optimizer: bool,
}

impl LegacyFolders {
    /// Finds the folders in `storage`; `None` where there is none with a model in it.
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

    /// Assigns the folders to ranks. Where a name has two numbers, `args` show whether the second
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
        let ranks = args.and_then(MegatronArgs::tensor_model_parallel_size).map_or(tp, narrow);
        let ranks = ranks.max(tp);
        if let Some(etp) = parts_of_experts(args).filter(|etp| *etp != ranks) {
            let sizes = Sizes { tp: ranks, ep: ep.max(narrow(groups)), etp };
            let context = size(args.and_then(MegatronArgs::context_parallel_size));
            let places = sizes.places(&found, context, &|stage, group, rank| {
                missing(&name(rank, stage, group, parts, of_experts))
            })?;
            let grid = Grid { tp, pp, ep: sizes.ep, etp, places };
            return grid.checked(args);
        }
        let mut places = Vec::with_capacity(found.len());
        for (stage, group, rank) in (0..pp).flat_map(|stage| {
            (0..ep).flat_map(move |group| (0..tp).map(move |rank| (stage, group, rank)))
        }) {
            let Some((folder, has_optimizer)) = found.get(&(stage, group, rank)) else {
                return Err(missing(&name(rank, stage, group, parts, of_experts)));
            };
            let (folder, has_optimizer) = ((*folder).clone(), *has_optimizer);
            let (tp, pp, ep, etp) = (rank, stage, group, rank);
            places.push(Place { tp, pp, ep, etp, folder, has_optimizer });
        }
        Grid { tp, pp, ep, etp: tp, places }.checked(args)
    }
}

/// Returns the number of ranks that share each expert; `None` without experts or the argument.
fn parts_of_experts(args: Option<&MegatronArgs>) -> Option<u32> {
    let args = args?;
    args.num_experts()?;
    args.count("expert_tensor_parallel_size").map(narrow).filter(|size| *size > 0)
}

fn narrow(size: u64) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}

/// The folders that there are: by stage, group of experts and tensor-parallel rank, the name and
/// whether it holds the file of a distributed optimizer.
type Found<'f> = BTreeMap<(u32, u32, u32), (&'f String, bool)>;

/// Sizes of a stage whose experts are shared by another number of ranks than its layers. Then not
/// every tensor-parallel rank has a part of every group of experts, and there are only folders of
/// those pairs that there are ranks of.
struct Sizes {
    tp: u32,
    ep: u32,
    etp: u32,
}

impl Sizes {
    /// Returns the part of its experts that each folder has, after checking that all parts are
    /// there. Ranks are numbered as Megatron-Core numbers them. Those save that are the first of
    /// replicas of layers (since 0.18) or of experts.
    fn places(
        &self,
        found: &Found<'_>,
        context: u64,
        missing: &dyn Fn(u32, u32, u32) -> MegatronError,
    ) -> Result<Vec<Place>, MegatronError> {
        let Self { tp, ep, etp } = *self;
        let [wide_tp, wide_ep, wide_etp] = [tp, ep, etp].map(u64::from);
        let ranks = wide_tp.saturating_mul(context).max(wide_etp.saturating_mul(wide_ep));
        if ranks > STAGE_MAX {
            return Err(MegatronError::Legacy {
                folder: format!("{PREFIX}*"),
                problem: format!(
                    "the arguments say that {etp} ranks share each expert, in {ep} groups: these \
                     are not sizes of a run"
                ),
            });
        }
        let mut parts: BTreeMap<(u32, u32), BTreeSet<u32>> = BTreeMap::new();
        for rank in 0..ranks {
            let group = narrow((rank / wide_etp) % wide_ep);
            let named = (group, narrow(rank % wide_tp));
            parts.entry(named).or_default().insert(narrow(rank % wide_etp));
        }
        let mut places = Vec::with_capacity(found.len());
        for (&(pp, group, rank), (folder, has_optimizer)) in found {
            let of_folder = parts.get(&(group, rank)).map(|parts| parts.iter().collect::<Vec<_>>());
            let part = match of_folder.as_deref() {
                Some([part]) => **part,
                Some(_) => {
                    return Err(MegatronError::Legacy {
                        folder: (*folder).clone(),
                        problem: format!(
                            "several ranks have this name that have different parts of the experts: \
                             {etp} ranks share each expert, and {tp} each layer. Each of them \
                             replaced what the one before had saved, so there is no telling which \
                             part this is; have Megatron-LM save it as --ckpt-format torch_dist"
                        ),
                    });
                }
                None => {
                    return Err(MegatronError::Legacy {
                        folder: (*folder).clone(),
                        problem: format!(
                            "no rank has this name where {etp} ranks share each expert, in {ep} \
                             groups, and {tp} each layer"
                        ),
                    });
                }
            };
            let (folder, has_optimizer) = ((*folder).clone(), *has_optimizer);
            places.push(Place { tp: rank, pp, ep: group, etp: part, folder, has_optimizer });
        }
        let stages: BTreeSet<u32> = places.iter().map(|place| place.pp).collect();
        for stage in 0..stages.last().map_or(0, |last| last.saturating_add(1)) {
            let has = |fits: &dyn Fn(&Place) -> bool| {
                places.iter().any(|place| place.pp == stage && fits(place))
            };
            for (&(group, rank), of_folder) in &parts {
                let has_layers = has(&|place| place.tp == rank);
                let has_experts =
                    of_folder.iter().all(|p| has(&|place| (place.ep, place.etp) == (group, *p)));
                if !has_layers || !has_experts {
                    return Err(missing(stage, group, rank));
                }
            }
        }
        Ok(places)
    }
}

impl Grid {
    /// The grid, if it has as many ranks as the arguments say.
    fn checked(self, args: Option<&MegatronArgs>) -> Result<Self, MegatronError> {
        let Self { tp, pp, .. } = self;
        let stages = args.and_then(MegatronArgs::pipeline_model_parallel_size).unwrap_or(1);
        let said = args.and_then(MegatronArgs::tensor_model_parallel_size);
        if let Some(said) = said.filter(|said| *said != u64::from(tp)) {
            return Err(missing_ranks("tensor", tp, said));
        }
        if args.is_some() && stages != u64::from(pp) {
            return Err(missing_ranks("pipeline", pp, stages));
        }
        Ok(self)
    }

    /// All ranks: stage by stage, in each group of experts by group, tensor-parallel ranks next
    /// to each other.
    pub(super) fn places(&self) -> impl Iterator<Item = &Place> {
        self.places.iter()
    }

    /// The rank at a position among all of them.
    pub(super) fn place(&self, at: usize) -> Option<&Place> {
        self.places.get(at)
    }

    /// Whether the place at a position is the first one with its part of the layers.
    pub(super) fn is_first(&self, at: usize) -> bool {
        let layers = |place: &Place| (place.tp, place.pp);
        let mut places = self.places.iter();
        self.place(at).is_some_and(|place| {
            places.position(|other| layers(other) == layers(place)) == Some(at)
        })
    }

    /// The folder with part `rank` of a stage's layers, or of a group of its experts.
    pub(super) fn folder(&self, rank: u32, pp: u32, group: Option<u32>) -> String {
        let place = self.places.iter().find(|place| {
            place.pp == pp
                && match group {
                    None => place.tp == rank,
                    Some(group) => (place.ep, place.etp) == (group, rank),
                }
        });
        place.map_or_else(|| format!("{PREFIX}{rank:02}"), |place| place.folder.clone())
    }
}

/// The first folder that the names of the others promise: ranks count from 0, and stages do. Where a
/// third number counts groups of experts, not every rank has a part of every group.
pub(crate) fn missing_folder<'n>(folders: impl Iterator<Item = &'n str>) -> Option<String> {
    let found: BTreeSet<Vec<u32>> = folders.filter_map(numbers).take(FOLDERS_MAX).collect();
    let parts = found.first()?.len();
    let counts = |part: usize| {
        let seen: BTreeSet<u32> = found.iter().filter_map(|one| one.get(part).copied()).collect();
        (0..).zip(&seen).find(|(expected, number)| expected != *number).map(|(absent, _)| absent)
    };
    for part in 0..parts {
        if let Some(absent) = counts(part) {
            let mut numbers = vec![0; parts];
            *numbers.get_mut(part)? = absent;
            return Some(folder_name(&numbers));
        }
    }
    if parts > 2 {
        return None;
    }
    let most =
        |part: usize| found.iter().filter_map(|one| one.get(part)).max().map_or(0, |most| *most);
    let stages = if parts == 2 { most(1) } else { 0 };
    let all = (0..=most(0)).flat_map(|tp| (0..=stages).map(move |second| [tp, second]));
    let mut all = all.map(|both| both.into_iter().take(parts).collect::<Vec<_>>());
    all.find(|numbers| !found.contains(numbers)).map(|numbers| folder_name(&numbers))
}

fn folder_name(numbers: &[u32]) -> String {
    let mut name = PREFIX.trim_end_matches('_').to_owned();
    for (part, number) in numbers.iter().enumerate() {
        let digits = if part == 0 { 2 } else { 3 };
        name.push_str(&format!("_{number:0digits$}"));
    }
    name
}

/// Whether a folder of this name is that of a rank.
pub(crate) fn is_rank_folder(name: &str) -> bool {
    numbers(name).is_some()
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
    use dcp_core::Value;
    use dcp_core::value::Dict;

    use super::*;

    #[test]
    fn names_of_folders_promise_others() {
        let missing = |names: &[&str]| missing_folder(names.iter().copied());
        assert_eq!(missing(&["mp_rank_00"]), None);
        assert_eq!(missing(&["mp_rank_00", "mp_rank_01", "logs"]), None);
        assert_eq!(missing(&["mp_rank_00", "mp_rank_02"]).as_deref(), Some("mp_rank_01"));
        assert_eq!(missing(&["mp_rank_01"]).as_deref(), Some("mp_rank_00"));
        let three = ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_001"];
        assert_eq!(missing(&three).as_deref(), Some("mp_rank_01_000"));
        // Two ranks share the layers, and each has its own experts.
        assert_eq!(missing(&["mp_rank_00_000_000", "mp_rank_01_000_001"]), None);
        assert_eq!(missing(&["mp_rank_00_001_000"]).as_deref(), Some("mp_rank_00_000_000"));
        assert_eq!(missing(&[]), None);
    }

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
        assert_eq!(grid.folder(0, 1, None), "mp_rank_00_001_000");
        assert_eq!(grid.folder(0, 1, Some(1)), "mp_rank_00_001_001");
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

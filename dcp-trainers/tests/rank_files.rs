//! Folders that verl, accelerate and torch wrote, merged and compared with what the programs had in memory.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code, though outside of functions")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dcp_core::registry::{Access, StorageRegistry};
use dcp_core::{DType, Dims, Region, Value};
use dcp_jobs::framework::Frameworks;
use dcp_jobs::keys::StatePart;
use dcp_jobs::read::{TensorReader, read_object};
use dcp_jobs::{Checkpoint, Error, Format, Keys, Opener};
use dcp_storage_fs::FsStorage;
use dcp_testing::{block_on, copy_folder, fixture};
use dcp_trainers::{RankFiles, RankFilesFormat};

type Tensors = BTreeMap<String, (DType, Dims, Vec<u8>)>;

/// The folders, and the names of what is not in `expected.safetensors`.
const FIXTURES: [(&str, &str, &[&str]); 10] = [
    ("verl_fsdp2_buffers_4r", "global_step_2/actor", &[]),
    ("verl_fsdp1_mesh_2r", "global_step_2/actor", &["extra_state.rank_"]),
    ("verl_fsdp1_orig_params_2r", "global_step_2/actor", &[]),
    ("verl_fsdp2_hsdp_2x2", "global_step_2/actor", &[]),
    ("verl_critic_fsdp2_4r", "global_step_2/critic", &[]),
    ("accelerate_fsdp1_rank_files_2r", "", &[]),
    ("accelerate_fsdp2_rank_files_2r", "", &[]),
    ("experimental_fsdp2_2r", "", &[]),
    ("t24_fsdp1_mesh_2r", "global_step_2/actor", &["optimizer."]),
    ("t24_dtensor_hsdp_2x2", "global_step_1/actor", &[]),
];

fn opener() -> Opener {
    let mut storages = StorageRegistry::empty();
    storages.register("file", |request| {
        let write = request.access == Access::Write;
        Ok(Arc::new(FsStorage::builder(&request.url).create(write).clean(write).open()?))
    });
    Opener::new(storages)
        .formats(dcp_jobs::listing::formats().with(Arc::new(RankFilesFormat)))
        .frameworks(Frameworks::none().with(Arc::new(RankFiles)))
}

async fn open(path: &Path) -> Result<Checkpoint, Error> {
    opener().open(path.to_str().unwrap()).await
}

async fn tensors(checkpoint: &Checkpoint) -> Tensors {
    let metadata = checkpoint.source().metadata().await.unwrap();
    let mut found = Tensors::new();
    for (position, (fqn, entry)) in metadata.iter().enumerate() {
        let Some(tensor) = entry.as_tensor() else { continue };
        let reader = Arc::clone(&checkpoint.source().reader);
        let reader = TensorReader::new(reader, Arc::clone(&metadata), position).unwrap();
        let whole = Region::full(tensor.shape.clone()).unwrap();
        let bytes = reader.read(&[whole]).await.unwrap();
        found.insert(fqn.to_string(), (tensor.dtype, tensor.shape.clone(), bytes.to_vec()));
    }
    found
}

fn folder(name: &str, inner: &str) -> PathBuf {
    fixture(&format!("trainers/{name}")).join("ckpt").join(inner)
}

#[test]
fn files_of_ranks_merge_to_what_the_programs_had() {
    block_on(async {
        for (name, inner, others) in FIXTURES {
            let checkpoint = open(&folder(name, inner)).await.unwrap();
            let expected = fixture(&format!("trainers/{name}/expected.safetensors"));
            let expected = tensors(&open(&expected).await.unwrap()).await;
            let mut found = tensors(&checkpoint).await;
            found.retain(|fqn, _| !others.iter().any(|other| fqn.starts_with(other)));
            let names = |all: &Tensors| all.keys().cloned().collect::<Vec<_>>();
            assert_eq!(names(&found), names(&expected), "{name}");
            for (fqn, tensor) in &expected {
                assert!(found[fqn] == *tensor, "{name}: {fqn} differs");
            }
            let report = checkpoint.verify().deep(true).run().await.unwrap();
            assert!(report.ok, "{name}: {:?}", report.problems);
        }
    });
}

#[test]
fn merged_checkpoints_are_written_as_others_are() {
    block_on(async {
        for (name, inner, _) in FIXTURES {
            let target = tempfile::tempdir().unwrap();
            let checkpoint = open(&folder(name, inner)).await.unwrap();
            let to = target.path().join("dcp").to_str().unwrap().to_owned();
            let convert = checkpoint.convert(to.clone()).to(Format::Dcp);
            convert.keys(Keys::all().part(StatePart::Everything)).run().await.unwrap();
            let written = tensors(&opener().open(&to).await.unwrap()).await;
            assert!(written == tensors(&checkpoint).await, "{name}");
        }
    });
}

/// Groups of an optimizer have the names of parameters, flat or not.
#[test]
fn groups_of_an_optimizer_name_parameters() {
    block_on(async {
        for name in ["verl_fsdp1_mesh_2r", "verl_fsdp1_orig_params_2r", "verl_fsdp2_buffers_4r"] {
            let checkpoint = open(&folder(name, "global_step_2/actor")).await.unwrap();
            let params = read_object(checkpoint.source(), "optimizer.param_groups.0.params");
            let params = params.await.unwrap();
            let params = params.as_list().unwrap();
            let first = params.first().and_then(Value::as_str);
            assert_eq!(first, Some("model.embed_tokens.weight"), "{name}");
            assert!(params.iter().all(|one| one.as_str().is_some()), "{name}");
        }
    });
}

#[test]
fn the_configuration_of_a_model_is_that_of_its_folder() {
    block_on(async {
        let target = tempfile::tempdir().unwrap();
        let checkpoint =
            open(&folder("verl_fsdp2_buffers_4r", "global_step_2/actor")).await.unwrap();
        let to = target.path().join("hf").to_str().unwrap().to_owned();
        checkpoint.convert(to).to(Format::HuggingFace).run().await.unwrap();
        for name in ["config.json", "tokenizer.json", "model.safetensors"] {
            assert!(target.path().join("hf").join(name).exists(), "{name}");
        }
        let written = tensors(&open(&target.path().join("hf")).await.unwrap()).await;
        assert!(written.contains_key("model.embed_tokens.weight"), "{:?}", written.keys());
    });
}

#[test]
fn buffers_that_differ_are_named() {
    block_on(async {
        let checkpoint = open(&folder("accelerate_fsdp2_rank_files_2r", "")).await.unwrap();
        let notes = checkpoint.notes().join("\n");
        assert!(notes.contains("\"model.bn.running_mean\""), "{notes}");
        let checkpoint = open(&folder("experimental_fsdp2_2r", "")).await.unwrap();
        let metadata = checkpoint.source().metadata().await.unwrap();
        assert!(metadata.get("rank_1.who.rank").is_some());
    });
}

/// Makes a copy of a role's folder and damages it; the error of opening it, where `examine` finds one, too.
fn refusal(fixture: &str, damage: impl FnOnce(&Path)) -> String {
    let run = tempfile::tempdir().unwrap();
    let step = run.path().join("global_step_2");
    copy_folder(&folder(fixture, "global_step_2/actor"), &step.join("actor"));
    damage(&step.join("actor"));
    block_on(async {
        let listing = opener().list(run.path().to_str().unwrap()).await.unwrap();
        let entry = listing.entries.iter().find(|entry| entry.name == "global_step_2").unwrap();
        assert_ne!(entry.complete, Some(true), "ls");
        match open(&step.join("actor")).await {
            Err(error) => format!("{error}: {:?}", error.get_ref().map(ToString::to_string)),
            Ok(_) => panic!("it opens"),
        }
    })
}

const BUFFERS: &str = "verl_fsdp2_buffers_4r";

#[test]
fn damage_is_refused_by_name_and_no_folder_of_it_is_complete() {
    let model = |rank: u32| format!("model_world_size_4_rank_{rank}.pt");
    let refused = |said: &str, damage: &dyn Fn(&Path)| {
        let error = refusal(BUFFERS, damage);
        assert!(error.contains(said), "{said}: {error}");
    };
    refused("model_world_size_4_rank_3.pt is missing", &|at| {
        fs::remove_file(at.join(model(3))).unwrap();
    });
    refused("rank_2.pt", &|at| {
        let bytes = fs::read(at.join(model(2))).unwrap();
        fs::write(at.join(model(2)), &bytes[..bytes.len() / 2]).unwrap();
    });
    refused("it was saved as", &|at| {
        fs::copy(at.join(model(0)), at.join(model(1))).unwrap();
    });
    refused("rank_1.pt", &|at| {
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n";
        fs::write(at.join(model(1)), pointer).unwrap();
    });
    refused("number that no rank has", &|at| {
        fs::copy(at.join(model(1)), at.join("model_world_size_4_rank_99999999999999999999.pt"))
            .unwrap();
    });
    refused("optim_world_size_2_rank_0.pt", &|at| {
        fs::write(at.join("fsdp_config.json"), "{\"world_size\": 2}").unwrap();
        for rank in 0..2 {
            fs::copy(at.join(model(rank)), at.join(format!("model_world_size_2_rank_{rank}.pt")))
                .unwrap();
        }
        fs::copy(at.join(model(0)), at.join("optim_world_size_2_rank_1.pt")).unwrap();
    });
    refused("fsdp_config.json", &|at| fs::write(at.join("fsdp_config.json"), "{").unwrap());
    refused("it was saved as", &|at| {
        fs::write(at.join("fsdp_config.json"), "{\"world_size\": 1}").unwrap();
        fs::copy(at.join(model(0)), at.join("model_world_size_1_rank_0.pt")).unwrap();
    });
}

/// Pieces of a flat parameter have no mark of their rank: the archive has the name that it was saved under.
#[test]
fn a_file_under_the_name_of_another_rank_is_refused() {
    for fixture in ["verl_fsdp1_mesh_2r", "verl_fsdp1_orig_params_2r"] {
        for swap in [false, true] {
            let error = refusal(fixture, |at| {
                let file = |rank: u32| at.join(format!("optim_world_size_2_rank_{rank}.pt"));
                if swap {
                    fs::rename(file(1), at.join("aside")).unwrap();
                    fs::copy(file(0), file(1)).unwrap();
                    fs::rename(at.join("aside"), file(0)).unwrap();
                } else {
                    fs::copy(file(0), file(1)).unwrap();
                }
            });
            assert!(error.contains("it was saved as"), "{error}");
            assert!(error.contains("optim_world_size_2_rank_"), "{error}");
        }
    }
}

/// A step opens at its actor, and is whole when its critic is as well.
#[test]
fn a_step_is_whole_when_each_of_its_roles_is() {
    let run = tempfile::tempdir().unwrap();
    let step = run.path().join("global_step_2");
    copy_folder(&folder(BUFFERS, "global_step_2/actor"), &step.join("actor"));
    let critic = folder("verl_critic_fsdp2_4r", "global_step_2/critic");
    copy_folder(&critic, &step.join("critic"));
    block_on(async {
        let state = async || {
            let listing = opener().list(run.path().to_str().unwrap()).await.unwrap();
            let entry = listing.entries.iter().find(|entry| entry.name == "global_step_2").unwrap();
            (entry.complete, format!("{entry:?}"))
        };
        assert_eq!(state().await.0, Some(true));
        let file = step.join("critic/model_world_size_4_rank_2.pt");
        let bytes = fs::read(&file).unwrap();
        for (len, said) in [(Some(bytes.len() / 2), "critic: "), (None, "is missing")] {
            match len {
                Some(len) => fs::write(&file, &bytes[..len]).unwrap(),
                None => fs::remove_file(&file).unwrap(),
            }
            let (complete, entry) = state().await;
            assert_ne!(complete, Some(true), "{entry}");
            assert!(entry.contains(said) && entry.contains("rank_2.pt"), "{entry}");
        }
    });
}

#[test]
fn a_folder_of_an_older_verl_has_no_configuration_of_its_world() {
    let run = tempfile::tempdir().unwrap();
    copy_folder(&folder(BUFFERS, "global_step_2/actor"), run.path());
    fs::remove_file(run.path().join("fsdp_config.json")).unwrap();
    block_on(async {
        let found = tensors(&open(run.path()).await.unwrap()).await;
        assert!(
            found == tensors(&open(&folder(BUFFERS, "global_step_2/actor")).await.unwrap()).await
        );
    });
}

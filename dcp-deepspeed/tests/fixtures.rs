//! Checkpoints that DeepSpeed 0.19.8 and 0.14.5 wrote, compared with what its engine held, bit for bit.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code, though outside of functions")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use dcp_core::error::error_chain;
use dcp_core::registry::{Access, StorageRegistry};
use dcp_core::{DType, Region};
use dcp_deepspeed::{DeepSpeed, DeepSpeedCheckpoint, DeepSpeedFormat};
use dcp_jobs::framework::Frameworks;
use dcp_jobs::read::{TensorReader, read_object};
use dcp_jobs::{Checkpoint, Error, Opener, Source};
use dcp_storage_fs::FsStorage;
use dcp_testing::{block_on, copy_folder, fixture};

type Tensors = BTreeMap<String, (DType, Vec<u64>, Vec<u8>)>;

/// Folders of ZeRO, and of training without it.
const FOLDERS: [&str; 22] = [
    "bf16opt_w2",
    "moe_z0_w2",
    "moe_z2_w2",
    "pipe_z0_w2",
    "pipe_z1_w4",
    "v0145_z2_fp16_w2",
    "v0145_z3_bf16_w2",
    "z0_fp16_w2",
    "z1_elastic_fp32_w2",
    "z1_fp32_w1",
    "z2_bf16_w2",
    "z2_legacyzip_w2",
    "z2_nostep_w2",
    "z2_paramalign_w2",
    "z2_roundrobin_w2",
    "z2_sgd_w2",
    "z3_bf16_w2",
    "z3_fp16_w4_subgroups",
    "z3_fp32_w1",
    "z3_nofrozen_w2",
    "universal_z1_bf16_w2",
    "universal_z3_bf16_w2",
];

fn opener() -> Opener {
    let mut storages = StorageRegistry::empty();
    storages.register("file", |request| {
        let write = request.access == Access::Write;
        Ok(Arc::new(FsStorage::builder(&request.url).create(write).clean(write).open()?))
    });
    Opener::new(storages)
        .formats(dcp_jobs::listing::formats().with(Arc::new(DeepSpeedFormat)))
        .frameworks(Frameworks::none().with(Arc::new(DeepSpeed)))
}

async fn open(path: &Path) -> Result<Checkpoint, Error> {
    opener().open(path.to_str().unwrap()).await
}

async fn tensors(source: &Source) -> Tensors {
    let metadata = source.metadata().await.unwrap();
    let mut found = Tensors::new();
    for (position, (fqn, entry)) in metadata.iter().enumerate() {
        let Some(tensor) = entry.as_tensor() else { continue };
        let reader = Arc::clone(&source.reader);
        let reader = TensorReader::new(reader, Arc::clone(&metadata), position).unwrap();
        let whole = Region::full(tensor.shape.clone()).unwrap();
        let bytes = reader.read(&[whole]).await.unwrap();
        found.insert(fqn.to_string(), (tensor.dtype, tensor.shape.to_vec(), bytes.to_vec()));
    }
    found
}

/// The `bfloat16` or `float16` elements of `float32` ones.
fn rounded(dtype: DType, bytes: &[u8]) -> Option<Vec<u8>> {
    let values = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    match dtype {
        DType::BFloat16 => {
            Some(values.flat_map(|v| half::bf16::from_f32(v).to_le_bytes()).collect())
        }
        DType::Float16 => Some(values.flat_map(|v| half::f16::from_f32(v).to_le_bytes()).collect()),
        _ => None,
    }
}

/// The key under which the state dict has what the fixture calls `key`.
fn key_of(name: &str, key: &str) -> String {
    let (kind, parameter) = key.split_once('.').unwrap();
    match kind {
        // A pipeline without ZeRO names its tied modules nowhere.
        "module" if name == "pipe_z0_w2" && parameter == "tied_modules.embed.word.weight" => {
            "model.0.word.weight".to_owned()
        }
        "fp32" | "module" => format!("model.{parameter}"),
        state => format!("optimizer.state.{parameter}.{state}"),
    }
}

#[test]
fn every_tensor_is_what_deepspeed_held() {
    block_on(async {
        for name in FOLDERS {
            let folder = fixture(&format!("deepspeed/{name}"));
            let opened =
                open(&folder.join("ckpt")).await.unwrap_or_else(|error| panic!("{name}: {error}"));
            let found = tensors(opened.source()).await;
            let expected = open(&folder.join("expected.safetensors")).await.unwrap();
            let expected = tensors(expected.source()).await;
            let mut compared = 0;
            for (key, (dtype, shape, bytes)) in &expected {
                let is_universal = name.starts_with("universal");
                let own = key_of(name, key);
                let state = own.replacen("model.", "optimizer.state.", 1);
                let is_untrained = !found.contains_key(&format!("{state}.exp_avg"));
                if is_universal && key.starts_with("fp32.") && is_untrained {
                    // ds_to_universal rounds tied weights and casts integers; those of the model states are taken.
                    assert!(found.contains_key(&own), "{name}: {own}");
                    continue;
                }
                let is_left_out = name == "z3_nofrozen_w2" && key.contains("frozen");
                let Some((own_dtype, own_shape, own_bytes)) = found.get(&own) else {
                    assert!(is_left_out, "{name}: there is no {own}");
                    continue;
                };
                compared += 1;
                let elements = |shape: &[u64]| shape.iter().product::<u64>();
                assert_eq!(elements(own_shape), elements(shape), "{name}: {own}");
                if !is_universal {
                    assert_eq!(own_shape, shape, "{name}: {own}");
                }
                if own_dtype == dtype {
                    assert!(own_bytes == bytes, "{name}: {own} differs");
                } else if let Some(low) = rounded(*dtype, own_bytes) {
                    assert!(low == *bytes, "{name}: {own} does not round to it");
                } else if let Some(low) = rounded(*own_dtype, bytes) {
                    // zero_to_fp32 casts the buffers of 16 bits.
                    assert!(low == *own_bytes, "{name}: {own} is another buffer");
                } else {
                    panic!("{name}: {own} is {own_dtype}, and {dtype} is expected");
                }
            }
            assert!(compared > 12, "{name}: {compared}");
        }
    });
}

#[test]
fn groups_name_their_parameters_and_the_trainer_keeps_its_state() {
    block_on(async {
        let opened = open(&fixture("deepspeed/z2_bf16_w2/ckpt")).await.unwrap();
        let names = read_object(opened.source(), "optimizer.param_groups.1.params").await.unwrap();
        let names: Vec<_> =
            names.as_list().unwrap().iter().filter_map(|name| name.as_str()).collect();
        assert_eq!(names, ["norm.weight", "norm.bias", "fc1.bias", "fc2.bias"]);
        let lr = read_object(opened.source(), "optimizer.param_groups.1.lr").await.unwrap();
        assert_eq!(lr.as_float(), Some(0.005));
        let steps = read_object(opened.source(), "trainer_state.global_steps").await.unwrap();
        assert_eq!(steps.as_int(), Some(2));
        let note = read_object(opened.source(), "trainer_state.note").await.unwrap();
        assert_eq!(note.as_str(), Some("tiny é"));
        let opened = open(&fixture("deepspeed/z3_fp16_w4_subgroups/ckpt")).await.unwrap();
        let names = read_object(opened.source(), "optimizer.param_groups.0.params").await.unwrap();
        assert_eq!(names.as_list().unwrap().len(), 3);
        let scaler = read_object(opened.source(), "trainer_state.loss_scaler").await.unwrap();
        assert!(scaler.as_dict().unwrap().get("cur_scale").is_some());
    });
}

#[test]
fn a_folder_of_transformers_is_the_step_in_it() {
    block_on(async {
        let folder = fixture("deepspeed/hf_trainer_deepspeed_z3_w2");
        let opened = open(&folder.join("ckpt")).await.unwrap();
        let found = tensors(opened.source()).await;
        let expected = open(&folder.join("expected.safetensors")).await.unwrap();
        for (key, (dtype, _, bytes)) in tensors(expected.source()).await {
            let Some((own, _, found)) = found.get(&key_of("", &key)) else { panic!("{key}") };
            if *own == dtype {
                assert!(*found == bytes, "{key}");
            }
        }
    });
}

#[test]
fn a_universal_folder_with_the_weights_of_other_parameters_is_refused() {
    block_on(async {
        let folder = fixture("deepspeed/universal_z2_roundrobin_w2_CORRUPT/ckpt");
        for path in [folder.clone(), folder.join("global_step2_universal")] {
            let error = error_chain(&open(&path).await.unwrap_err());
            assert!(error.contains("round_robin_gradients"), "{error}");
        }
        let listed = opener().list(folder.to_str().unwrap()).await.unwrap();
        assert_eq!(listed.entries[0].complete, Some(false), "{listed:?}");
    });
}

#[test]
fn a_description_says_how_it_was_saved() {
    block_on(async {
        let of = async |name: &str| {
            let opened = open(&fixture(&format!("deepspeed/{name}/ckpt"))).await.unwrap();
            assert!(opened.source().extension::<DeepSpeedCheckpoint>().is_none());
            let found = opened.inspect().run().await.unwrap().framework.unwrap();
            found.json().clone()
        };
        let found = of("pipe_z1_w4").await;
        assert_eq!(
            (&found["stage"], &found["model_parallel"], &found["layers"]),
            (&1.into(), &2.into(), &5.into())
        );
        assert_eq!((&found["data_parallel"], &found["global_steps"]), (&2.into(), &2.into()));
        assert_eq!(of("universal_z1_bf16_w2").await["format"], "universal");
        assert_eq!(of("z0_fp16_w2").await["stage"], 0);
        assert_eq!(of("v0145_z3_bf16_w2").await["written_by"], "0.14.5");
    });
}

/// Damages a copy of the step `step` of a fixture.
fn damaged(name: &str, damage: impl Fn(&Path)) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    copy_folder(&fixture(&format!("deepspeed/{name}/ckpt")), copy.path());
    damage(&copy.path().join("global_step2"));
    copy
}

fn file(name: &str, rank: u32) -> String {
    let bf16 = if name.contains("bf16") { "bf16_" } else { "" };
    format!("{bf16}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
}

/// Opening, listing and examining say the same of what is not whole.
async fn refused(what: &str, copy: &Path, said: &str) {
    let step = copy.join("global_step2");
    let error = error_chain(&open(&step).await.unwrap_err());
    assert!(error.contains(said), "{what}: {error}");
    let listed = opener().list(copy.to_str().unwrap()).await.unwrap();
    let entry = listed.entries.iter().find(|entry| entry.name == "global_step2").unwrap();
    assert_eq!(entry.complete, Some(false), "{what}: {entry:?}");
}

#[test]
fn what_is_not_a_whole_save_is_refused_by_name() {
    block_on(async {
        let z2 = "z2_bf16_w2";
        let remove = |name: String| move |step: &Path| fs::remove_file(step.join(&name)).unwrap();
        let first = damaged(z2, remove(file(z2, 0)));
        refused("the first rank", first.path(), &file("", 0)).await;
        let last = damaged(z2, remove(file(z2, 1)));
        refused("the last rank", last.path(), "save of 2 ranks").await;
        let model = damaged(z2, remove("mp_rank_00_model_states.pt".to_owned()));
        refused("the model", model.path(), "model_states").await;
        let none = damaged(z2, |step| {
            (0..2).for_each(|rank| fs::remove_file(step.join(file(z2, rank))).unwrap());
        });
        refused("no optimizer", none.path(), "optim_states.pt").await;
        let third =
            damaged("z3_bf16_w2", remove("zero_pp_rank_1_mp_rank_00_model_states.pt".to_owned()));
        refused("model of stage 3", third.path(), "rank_1_mp_rank_00_model_states").await;
        let layer = damaged("pipe_z1_w4", remove("layer_02-model_states.pt".to_owned()));
        refused("a layer", layer.path(), "layer_02").await;
        let expert =
            damaged("moe_z2_w2", remove("layer_1_expert_3_mp_rank_00_model_states.pt".to_owned()));
        refused("an expert", expert.path(), "8 experts").await;
        let cut = damaged(z2, |step| {
            let path = step.join(file(z2, 1));
            let bytes = fs::read(&path).unwrap();
            fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
        });
        refused("a truncated file", cut.path(), &file(z2, 1)).await;
        let empty = damaged(z2, |step| fs::write(step.join(file(z2, 1)), b"").unwrap());
        refused("an empty file", empty.path(), &file(z2, 1)).await;
        let pointer = damaged(z2, |step| {
            let text = "version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 12\n";
            fs::write(step.join(file(z2, 1)), text).unwrap();
        });
        refused("a pointer", pointer.path(), "LFS").await;
        let huge = damaged(z2, |step| {
            let name = "bf16_zero_pp_rank_18446744073709551615_mp_rank_00_optim_states.pt";
            fs::copy(step.join(file(z2, 1)), step.join(name)).unwrap();
        });
        refused("a huge number", huge.path(), "no rank writes").await;
        let third = damaged(z2, |step| {
            let of = fixture("deepspeed/z3_fp16_w4_subgroups/ckpt/global_step2").join(file("", 2));
            fs::copy(of, step.join(file("", 2))).unwrap();
        });
        refused("a rank of stage 3", third.path(), "another stage").await;
        let fewer = damaged("z3_fp16_w4_subgroups", |step| {
            fs::remove_file(step.join(file("", 3))).unwrap();
            fs::remove_file(step.join("zero_pp_rank_3_mp_rank_00_model_states.pt")).unwrap();
        });
        refused("a lost last rank", fewer.path(), "there are files of 3").await;
        let other = damaged(z2, |step| {
            let of = fixture("deepspeed/z2_nostep_w2/ckpt/global_step0").join(file(z2, 1));
            fs::copy(of, step.join(file(z2, 1))).unwrap();
        });
        refused("a file of another step", other.path(), "state of group 0").await;
        let elastic = damaged("z1_elastic_fp32_w2", |step| {
            let of = fixture("deepspeed/v0145_z2_fp16_w2/ckpt/global_step2").join(file("", 1));
            fs::copy(of, step.join(file("", 1))).unwrap();
        });
        refused("a rank of stage 2", elastic.path(), "another stage").await;
        let models = damaged("z3_bf16_w2", |step| {
            let name = "zero_pp_rank_1_mp_rank_00_model_states.pt";
            fs::copy(
                fixture("deepspeed/v0145_z3_bf16_w2/ckpt/global_step2").join(name),
                step.join(name),
            )
            .unwrap();
        });
        refused("models of two saves", models.path(), "different saves").await;
    });
}

/// The buffers of a rank look like those of every other: the archive has the name that it was saved under.
#[test]
fn a_file_under_the_name_of_another_rank_is_refused() {
    block_on(async {
        for name in ["z2_bf16_w2", "z3_bf16_w2", "z1_elastic_fp32_w2"] {
            let copied = damaged(name, |step| {
                fs::copy(step.join(file(name, 0)), step.join(file(name, 1))).unwrap();
            });
            refused(name, copied.path(), "it was saved as").await;
            let swapped = damaged(name, |step| {
                let (one, other) = (step.join(file(name, 0)), step.join(file(name, 1)));
                fs::rename(&one, step.join("aside")).unwrap();
                fs::rename(&other, &one).unwrap();
                fs::rename(step.join("aside"), &other).unwrap();
            });
            refused(name, swapped.path(), "it was saved as").await;
        }
    });
}

#[test]
fn a_run_opens_the_last_complete_step_whatever_latest_says() {
    block_on(async {
        let copy = tempfile::tempdir().unwrap();
        let z2 = "z2_bf16_w2";
        copy_folder(&fixture(&format!("deepspeed/{z2}/ckpt")), copy.path());
        copy_folder(&copy.path().join("global_step2"), &copy.path().join("global_step10"));
        fs::write(copy.path().join("latest"), "global_step10").unwrap();
        let opened = open(copy.path()).await.unwrap();
        assert!(opened.place().ends_with("global_step10"), "{}", opened.place());
        fs::remove_file(copy.path().join("global_step10").join(file(z2, 1))).unwrap();
        let opened = open(copy.path()).await.unwrap();
        assert!(opened.place().ends_with("global_step2"), "{}", opened.place());
        assert!(
            opened.notes().iter().any(|note| note.contains("not complete")),
            "{:?}",
            opened.notes()
        );
        for text in ["../outside", "global_step3", ""] {
            fs::write(copy.path().join("latest"), text).unwrap();
            let opened = open(copy.path()).await.unwrap();
            assert!(opened.place().ends_with("global_step2"), "{text}: {}", opened.place());
        }
    });
}

#[test]
fn damaged_elements_are_found() {
    block_on(async {
        let copy = damaged("z2_bf16_w2", |step| {
            let path = step.join(file("bf16", 0));
            let mut bytes = fs::read(&path).unwrap();
            // Elements are aligned to 64 bytes behind the pickle; these are in the first large storage.
            let stored = bytes
                .windows(9)
                .position(|part| part == b"data/2\x46\x42\x09")
                .unwrap_or(bytes.len() / 2);
            bytes[stored + 200] ^= 0x10;
            fs::write(path, bytes).unwrap();
        });
        let step = copy.path().join("global_step2");
        match open(&step).await {
            Ok(opened) => {
                let report = opened.verify().deep(true).run().await.unwrap();
                assert!(!report.ok, "{report:?}");
            }
            Err(error) => assert!(error_chain(&error).contains("optim_states"), "{error}"),
        }
    });
}

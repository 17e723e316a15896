//! What is written never takes the place of what is read.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::support::{copy_of, dcp, path};

/// Every file below a folder.
fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let at = entry.unwrap().path();
            if at.is_dir() {
                folders.push(at);
            } else {
                all.insert(at.display().to_string(), fs::read(&at).unwrap());
            }
        }
    }
    all
}

#[test]
fn a_target_that_touches_a_source_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    let source = "fsdp2_adam_2r";
    dcp(["convert", source, &at("m"), "--to", "dcp"]).ok();
    dcp(["convert", source, &at("run/step3/model_and_optim"), "--to", "dcp"]).ok();
    dcp(["convert", source, &at("h"), "--to", "hf"]).ok();
    dcp(["convert", source, &at("a/model.safetensors"), "--model-only"]).ok();
    dcp(["convert", source, &at("x.pt")]).ok();
    fs::write(at("h/config.json"), "{}").unwrap();
    let shard = fs::read_dir(at("h")).unwrap().map(|entry| entry.unwrap().file_name());
    let shard = shard.map(|name| name.into_string().unwrap());
    let shard = shard.filter(|name| name.ends_with(".safetensors")).min().unwrap();
    let shard = at(&format!("h/{shard}"));
    let (m, file) = (at("m"), at("a/model.safetensors"));
    let tensor = |uri: &str| {
        let keys = dcp(["inspect", uri, "--json"]).json()["keys"].as_object().unwrap().clone();
        keys.into_iter().find(|(_, key)| key["kind"] == "tensor").unwrap().0
    };
    let (key, weight) = (tensor(&m), tensor(&file));
    let before = contents(folder.path());
    let commands: &[&[&str]] = &[
        &["convert", &file, &at("a"), "--to", "hf"],
        &["convert", &file, &at("a/../a/model.safetensors")],
        &["convert", &at("h"), &shard],
        &["convert", &at("h"), &at("h/config.json"), "--to", "torch-save"],
        &["convert", &m, &at("m/__0_0.distcp"), "--to", "torch-save"],
        &["convert", &m, &at("m/.metadata"), "--to", "torch-save"],
        &["convert", &m, &m, "--to", "hf"],
        &[
            "convert",
            &at("run/step3"),
            &at("run/step3/model_and_optim"),
            "--to",
            "dcp",
            "--model-only",
        ],
        &["convert", &at("run/step3"), &at("run/step3"), "--to", "dcp"],
        &["convert", &at("x.pt"), &at("./x.pt")],
        &["reshard", &at("run/step3"), &at("run/step3/model_and_optim"), "-n", "2"],
        &["unshard", &at("run/step3"), &at("run/step3/model_and_optim")],
        &["unshard", &file, &at("a")],
        &["average", &m, &m, "--out", &at("m/__0_0.distcp"), "--to", "safetensors"],
        &[
            "average",
            &m,
            &at("run/step3"),
            "--out",
            &at("run/step3/model_and_optim"),
            "--to",
            "dcp",
        ],
        &["average", &m, &at("run/step3"), "--out", &m, "--to", "dcp"],
        &["merge", &m, "--out", &at("m/__0_0.distcp"), "--to", "torch-save"],
        &["merge", &file, "--out", &at("a"), "--to", "hf"],
        &["report", &at("x.pt"), "-o", &at("x.pt")],
        &["report", &m, "-o", &at("m/.metadata")],
        &["get", &file, &weight, "-o", &file],
        &["get", &at("h"), &weight, "-o", &shard],
        &["get", &m, &key, "-o", &m],
    ];
    for command in commands {
        let run = dcp(command.iter().chain(&["--overwrite"]));
        assert_eq!(run.code, 2, "{command:?}: {}{}", run.stdout, run.stderr);
        assert!(run.stderr.contains("source"), "{command:?}: {}", run.stderr);
        assert!(contents(folder.path()) == before, "{command:?} changed something");
    }
}

#[test]
fn a_folder_in_the_source_or_around_it_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    dcp(["convert", "fsdp2_adam_2r", &at("m"), "--to", "dcp"]).ok();
    let megatron = crate::megatron::megatron("gpt_tp2pp2_swiglu/ckpt");
    dcp_testing::copy_folder(megatron.as_ref(), at("runs/g").as_ref());
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(at("m"), at("link")).unwrap();
        std::os::unix::fs::symlink(at("runs/g"), at("other")).unwrap();
    }
    let before = contents(folder.path());
    let (m, g) = (at("m"), at("runs/g"));
    let commands: &[&[&str]] = &[
        &["convert", &m, &at("m/new"), "--to", "dcp"],
        &["convert", &m, &at("m/deep/er/new"), "--to", "hf"],
        &["convert", &m, &at("runs/../m/new"), "--to", "hf"],
        &["reshard", &m, &at("m/new"), "-n", "3"],
        &["unshard", &m, &at("m/new")],
        &["average", &m, &m, "--out", &at("m/new"), "--to", "dcp"],
        &["merge", &m, "--out", &at("m/new"), "--to", "torch-dist"],
        &["convert", &g, &at("runs/g/new"), "--to", "torch-dist"],
        &["convert", &g, &at("runs/g/new"), "--to", "hf"],
        &["reshard", &g, &at("runs/g/new"), "--tp", "1"],
        &["reshard", &g, &at("runs"), "--tp", "1"],
        &["convert", &g, &at("runs"), "--to", "hf"],
    ];
    let linked: &[&[&str]] = &[
        &["convert", &m, &at("link/new"), "--to", "dcp"],
        &["convert", &at("link"), &at("m/new"), "--to", "dcp"],
        &["convert", &m, &at("link"), "--to", "dcp"],
        &["reshard", &at("other"), &g, "--tp", "1"],
        &["reshard", &g, &at("other"), "--tp", "1"],
        &["reshard", &g, &at("other/new"), "--tp", "1"],
    ];
    for command in commands.iter().chain(linked.iter().filter(|_| cfg!(unix))) {
        for more in [[].as_slice(), &["--overwrite"]] {
            let run = dcp(command.iter().chain(more));
            assert_eq!(run.code, 2, "{command:?}: {}{}", run.stdout, run.stderr);
            assert!(run.stderr.contains("source"), "{command:?}: {}", run.stderr);
            assert!(contents(folder.path()) == before, "{command:?} changed something");
            assert!(!Path::new(&at("m/new")).exists() && !Path::new(&at("runs/g/new")).exists());
        }
    }
}

#[test]
fn a_free_name_beside_the_source_may_be_written() {
    let folder = copy_of("zstd_2r");
    let source = folder.path().display().to_string();
    let page = path(&folder, "report.html");
    dcp(["report", &source, "-o", &page]).ok();
    dcp(["report", &source, "-o", &page, "--overwrite"]).ok();
    dcp(["convert", &source, &path(&folder, "all.pt")]).ok();
    dcp(["verify", &source, "--deep"]).ok();
}

//! Nothing of a checkpoint acts on the terminal: every command, on checkpoints with control
//! characters in every name, value, dtype, class and path.

use std::fs;
use std::path::Path;

use dcp::DType;
use dcp::core::text::is_unsafe;
use dcp::formats::pickle::Writer;
use dcp::formats::safetensors::{SafetensorsItem, encode_header};
use dcp::formats::torch_zip::{ArchiveEncoder, RecordSet};

use crate::support::{Run, command, copy_of, dcp, finish, path};

/// A color, a bell, a line of its own, the other direction of writing, C1's way to begin a
/// sequence, and nothing to be seen.
const HOSTILE: &str = "w\x1b[31m\x07\r\nerror: forged\u{202e}\u{9b}31m\u{200b}\x7f";

#[track_caller]
fn harmless(what: &[&str], run: &Run) {
    for (stream, text) in [("stdout", &run.stdout), ("stderr", &run.stderr)] {
        let bad = text.chars().find(|c| *c != '\n' && is_unsafe(*c));
        assert_eq!(bad, None, "{what:?}, {stream}: {text:?}");
        let forged = text.lines().find(|line| line.trim_start().starts_with("error: forged"));
        assert_eq!(forged, None, "{what:?}, {stream}");
    }
    let longest = run.stderr.lines().map(str::len).max().unwrap_or(0);
    assert!(longest < 16 << 10, "{what:?}: a line of {longest} bytes on stderr");
    assert!(matches!(run.code, 0..=3), "{what:?} ended with {}: {}", run.code, run.stderr);
}

fn safetensors(file: &Path, names: &[&str]) {
    let item = |name: &&str| SafetensorsItem {
        name: (*name).into(),
        dtype: DType::UInt8,
        shape: [1].into(),
    };
    let items: Vec<_> = names.iter().map(item).collect();
    let header = encode_header(&items, &Default::default()).unwrap();
    let mut bytes = header.bytes.to_vec();
    bytes.resize(usize::try_from(header.byte_len).unwrap(), 7);
    fs::write(file, bytes).unwrap();
}

/// A file of `torch.save`: a tensor, texts, and an object of a class, under hostile names.
fn torch_save(file: &Path) {
    let mut writer = Writer::new();
    let keys = [HOSTILE, "text", "object", "call"];
    writer
        .dict(keys.into_iter(), |writer, key| {
            writer.str(key);
            let class = HOSTILE.replace('\n', "\x0b");
            match key {
                "text" => writer.str(HOSTILE),
                "object" => {
                    writer.global(&class, &class);
                    writer.empty_tuple();
                    writer.new_object();
                    writer.dict([HOSTILE].into_iter(), |writer, key| {
                        writer.str(key);
                        writer.str(HOSTILE);
                        Ok::<_, dcp::core::FormatError>(())
                    })?;
                    writer.build();
                }
                "call" => {
                    writer.global("os", "system");
                    writer.tuple(1, |writer| {
                        writer.str(HOSTILE);
                        Ok::<_, dcp::core::FormatError>(())
                    })?;
                    writer.call();
                }
                _ => {
                    writer.global("torch._utils", "_rebuild_tensor_v2");
                    writer.tuple(6, |writer| {
                        writer.storage(("torch", "ByteStorage"), "0", HOSTILE, 4);
                        writer.uint(0);
                        writer.uint_tuple(&[4]);
                        writer.uint_tuple(&[1]);
                        writer.bool(false);
                        writer.none();
                        Ok::<_, dcp::core::FormatError>(())
                    })?;
                    writer.call();
                }
            }
            Ok::<_, dcp::core::FormatError>(())
        })
        .unwrap();
    let pickle = writer.finish().unwrap();
    let archive = ArchiveEncoder::encode(RecordSet::default(), pickle, &[&[1, 2, 3, 4]]).unwrap();
    fs::write(file, archive).unwrap();
}

/// Walks every command that reads over a checkpoint.
fn walk(uri: &str, out: &tempfile::TempDir) {
    let at = |name: &str| path(out, name);
    let (st, hf, save, folder, dist, html, npy) = (
        at("o.safetensors"),
        at("hf"),
        at("o.pt"),
        at("dcp"),
        at("dist"),
        at("o.html"),
        at("o.npy"),
    );
    let (averaged, merged, olmo) = (at("a.safetensors"), at("merged"), at("olmo"));
    let commands: &[&[&str]] = &[
        &["ls", uri],
        &["ls", uri, "--json"],
        &["prune", uri, "--keep-last", "1", "--dry-run"],
        &["prune", uri, "--keep-last", "1", "--dry-run", "--json"],
        &["inspect", uri],
        &["inspect", uri, "--all", "-vv"],
        &["inspect", uri, "--json"],
        &["inspect", uri, "--common"],
        &["inspect", uri, "--args"],
        &["inspect", uri, "--shards", HOSTILE],
        &["inspect", uri, "--shards", "\x1b[31m"],
        &["inspect", uri, "--filter", HOSTILE],
        &["verify", uri],
        &["verify", uri, "--deep", "-vv"],
        &["verify", uri, "--deep", "--json"],
        &["get", uri, HOSTILE],
        &["get", uri, HOSTILE, "--json"],
        &["get", uri, HOSTILE, "--slice", HOSTILE],
        &["get", uri, HOSTILE, "-o", &npy, "--overwrite"],
        &["get", uri, "text"],
        &["get", uri, "object"],
        &["get", uri, "object", "--json"],
        &["get", uri, "w\x1b[31m\x07"],
        &["stats", uri],
        &["stats", uri, "--json"],
        &["stats", uri, "--nan"],
        &["diff", uri, uri],
        &["diff", uri, "fsdp2_adam_2r"],
        &["diff", "fsdp2_adam_2r", uri, "--json"],
        &["report", uri, "-o", &html, "--overwrite"],
        &["convert", uri, &st, "--to", "safetensors", "--dry-run"],
        &["convert", uri, &st, "--to", "safetensors", "--overwrite", "-v"],
        &["convert", uri, &hf, "--to", "hf", "--overwrite"],
        &["convert", uri, &save, "--to", "torch-save", "--overwrite"],
        &["convert", uri, &folder, "--to", "dcp", "--overwrite", "-vv"],
        &["convert", uri, &folder, "--to", "dcp", "--overwrite", "--allow-callable", "*"],
        &["convert", uri, &dist, "--to", "torch-dist", "--overwrite"],
        &["convert", uri, &st, "--to", "safetensors", "--overwrite", "--dtype", "bf16", "--json"],
        &["convert", uri, &st, "--overwrite", "--rename", "^w=v"],
        &["reshard", uri, &folder, "--ranks", "2", "--overwrite"],
        &["average", uri, uri, "--out", &averaged, "--overwrite"],
        &["merge", uri, uri, "--out", &merged, "--overwrite"],
        &["unshard", uri, &olmo],
        &["rewrite-metadata", uri, "--dry-run"],
    ];
    for args in commands {
        for json in [&[] as &[&str], &["--json"]] {
            if !json.is_empty() && (args.contains(&"--json") || args.contains(&"--shards")) {
                continue;
            }
            let args = [*args, json].concat();
            let run = finish(command().args(&args).output().unwrap());
            harmless(&args, &run);
        }
    }
    for folder in [&folder, &hf, &merged, &dist] {
        let _ = fs::remove_dir_all(folder);
    }
    if let Ok(page) = fs::read_to_string(&html) {
        let bad = page.chars().find(|c| *c != '\n' && *c != '\t' && is_unsafe(*c));
        assert_eq!(bad, None, "the page of {uri}");
    }
}

#[test]
fn names_in_a_safetensors_file() {
    let (folder, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = path(&folder, "m.safetensors");
    safetensors(file.as_ref(), &[HOSTILE, "a.\x1b[2J", "text", &"\x1b]0;".repeat(1 << 12)]);
    walk(&file, &out);
    // A header that is no JSON any more, and one whose dtype is hostile.
    let whole = fs::read(&file).unwrap();
    for (from, to) in
        [(&b"\"U8\""[..], &b"\"\x1b8\""[..]), (b"\"U8\"", b"\"\\r\""), (b"dtype", b"d\x1bype")]
    {
        let mut bytes = whole.clone();
        let at = bytes.windows(from.len()).position(|w| w == from).unwrap();
        bytes[at..at + from.len()].copy_from_slice(to);
        fs::write(&file, bytes).unwrap();
        walk(&file, &out);
    }
}

#[test]
fn names_and_values_in_a_file_of_torch_save_and_what_is_made_of_it() {
    let (folder, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = path(&folder, "m.pt");
    torch_save(file.as_ref());
    walk(&file, &out);
    let converted = path(&folder, "dcp");
    dcp(["convert", &file, &converted, "--to", "dcp", "--allow-callable", "*"]).ok();
    walk(&converted, &out);
    // Files that it names and that are not there.
    for entry in fs::read_dir(&converted).unwrap() {
        let entry = entry.unwrap().path();
        if entry.extension().is_some_and(|ending| ending == "distcp") {
            fs::remove_file(entry).unwrap();
        }
    }
    walk(&converted, &out);
}

#[test]
fn dtypes_and_classes_in_a_metadata() {
    let out = tempfile::tempdir().unwrap();
    let folder = copy_of("fsdp2_adam_2r");
    let metadata = folder.path().join(".metadata");
    let whole = fs::read(&metadata).unwrap();
    for (from, to) in [
        (&b"float32"[..], &b"\x1b[31m\r\x07"[..]),
        (b"TensorStorageMetadata", b"Tensor\x1b[31mrageMetad\r"),
        (b"model.embed.weight", b"model.\x1b[31mdweigh\r"),
        (b"__0_0.distcp", b"\x1b[31m\rdistcp"),
    ] {
        let mut bytes = whole.clone();
        let places: Vec<_> = (0..bytes.len() - from.len())
            .filter(|at| bytes[*at..*at + from.len()] == *from)
            .collect();
        assert!(!places.is_empty() && from.len() == to.len(), "{from:?}");
        for at in places {
            bytes[at..at + from.len()].copy_from_slice(to);
        }
        fs::write(&metadata, bytes).unwrap();
        walk(&folder.path().display().to_string(), &out);
    }
}

#[test]
fn names_in_an_index_of_hugging_face() {
    let (folder, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = format!("{HOSTILE}.safetensors");
    safetensors(&folder.path().join(&file), &[HOSTILE]);
    let index = |files: &[(&str, &str)]| {
        let map: serde_json::Map<_, _> =
            files.iter().map(|(name, file)| ((*name).to_owned(), (*file).into())).collect();
        let text = serde_json::json!({ "metadata": {}, "weight_map": map }).to_string();
        fs::write(folder.path().join("model.safetensors.index.json"), text).unwrap();
    };
    let uri = folder.path().display().to_string();
    index(&[(HOSTILE, &file)]);
    walk(&uri, &out);
    let long = format!("{}.safetensors", "\x1b".repeat(200));
    index(&[(HOSTILE, &file), (&"n\x1b".repeat(2048), "gone\x1b[31m.safetensors"), ("x", &long)]);
    walk(&uri, &out);
    index(&[(HOSTILE, "../\x1b[31m\r")]);
    walk(&uri, &out);
    let impossible = "\x1b/".repeat(2048);
    index(&[(HOSTILE, &impossible)]);
    walk(&uri, &out);
}

#[test]
fn names_of_folders_files_and_what_trackers_say() {
    let (folder, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let step = folder.path().join(format!("step_1{HOSTILE}"));
    fs::create_dir(&step).unwrap();
    for entry in fs::read_dir(copy_of("zstd_2r").path()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), step.join(entry.file_name())).unwrap();
    }
    fs::create_dir(folder.path().join("iter_0000001")).unwrap();
    fs::write(folder.path().join("iter_0000001/metadata.json"), "{}").unwrap();
    let uri = folder.path().display().to_string();
    for tracked in ["\x1b[31m", "7", "release"] {
        fs::write(folder.path().join("latest_checkpointed_iteration.txt"), tracked).unwrap();
        walk(&uri, &out);
    }
    walk(&step.display().to_string(), &out);
    fs::write(step.join(format!("__0_0{HOSTILE}.distcp")), "").unwrap();
    fs::remove_file(step.join(".metadata")).unwrap();
    walk(&step.display().to_string(), &out);
}

#[test]
fn what_files_of_megatron_say() {
    let out = tempfile::tempdir().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let json = |backend: &str, version: &str| {
        serde_json::json!({
            "sharded_backend": backend, "sharded_backend_version": 1,
            "common_backend": version, "common_backend_version": 1,
        })
        .to_string()
    };
    let at = |name: &str| folder.path().join(name);
    let uri = folder.path().display().to_string();
    torch_save(&at("common.pt"));
    let damaged = copy_of("fsdp2_adam_2r");
    for entry in fs::read_dir(damaged.path()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), at(&entry.file_name().to_string_lossy())).unwrap();
    }
    for text in
        [json("torch_dist", "torch"), json(HOSTILE, "torch"), format!("{{\"\x1b[31m{HOSTILE}")]
    {
        fs::write(at("metadata.json"), text).unwrap();
        walk(&uri, &out);
    }
    fs::write(at("metadata.json"), json("torch_dist", "torch")).unwrap();
    fs::write(at("integrity.json"), format!("{{\"files\": {{\"\\u001b[31m\": \"{}\"}}}}", "\\r"))
        .unwrap();
    fs::write(
        at("run_config.yaml"),
        format!("model:\n  num_layers: \"\\e[31m\"\n  \"\\r\": [{HOSTILE}"),
    )
    .unwrap();
    walk(&uri, &out);
    let arch = at("my.toml");
    fs::write(&arch, format!("[[rule]]\nname = \"\\u001b[31m\"\n{HOSTILE}")).unwrap();
    let (arch, hf) = (arch.display().to_string(), path(&out, "hf"));
    let args = ["convert", &uri, &hf, "--to", "hf", "--arch", &arch];
    harmless(&args, &dcp(args));
}

//! Every command on every storage, and the table in README.md that says so.
//!
//! `cargo xtask emulators run -- cargo test -p dcp-cli --test storages` starts object stores. Without
//! one, its tests are reported as ignored.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail loudly")]

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;

use dcp::formats::safetensors::{Header, PREFIX_LEN, header_len};
use libtest_mimic::{Arguments, Failed, Trial};
use tempfile::TempDir;

/// A place to keep checkpoints.
#[derive(Clone, Debug)]
struct Place {
    /// The header of its column.
    name: &'static str,
    /// The URL of a folder, where the storage is there.
    base: Option<String>,
    /// Options of the command.
    options: Vec<String>,
    /// The folder that a read-only storage serves.
    served: Option<PathBuf>,
}

/// The columns of the table.
const PLACES: [&str; 5] = ["local disk", "S3", "Azure", "GCS", "HTTP"];

/// The checkpoint of most rows: PyTorch's, saved by two ranks.
const SOURCE: &str = "pytorch/fsdp2_adam_2r";
const KEY: &str = "model.embed.weight";

/// The rows of the table: what is run. `SRC` is the copy of a checkpoint in the storage, `OUT` a
/// free place there, `FILE` a free place on local disk.
const ROWS: &[(&str, &str, &[&str])] = &[
    ("`inspect`", SOURCE, &["inspect", "SRC", "--json"]),
    ("`verify --deep`", SOURCE, &["verify", "SRC", "--deep", "--json"]),
    ("`get`", SOURCE, &["get", "SRC", KEY, "--json"]),
    ("`stats`", SOURCE, &["stats", "SRC", "--json"]),
    ("`diff`", SOURCE, &["diff", "SRC", "SRC", "--json"]),
    ("`report`", SOURCE, &["report", "SRC", "-o", "FILE.html"]),
    ("`ls`", "", &["ls", "SRC", "--json"]),
    ("`prune`", "", &["prune", "SRC", "--keep-last=1", "--incomplete", "--yes", "--json"]),
    ("`convert` from it", SOURCE, &["convert", "SRC", "FILE.safetensors", "--everything"]),
    (
        "`--cache-dir`",
        SOURCE,
        &["convert", "SRC", "FILE.safetensors", "--everything", "--cache-dir", "FILE-cache"],
    ),
    ("`convert --to safetensors`", SOURCE, &["convert", "SRC", "OUT.safetensors", "--everything"]),
    (
        "`convert --to hf`",
        SOURCE,
        &["convert", "SRC", "OUT", "--to=hf", "--everything", "--arch=none"],
    ),
    ("`convert --to torch-save`", SOURCE, &["convert", "SRC", "OUT.pt"]),
    ("`convert --to dcp`", SOURCE, &["convert", "SRC", "OUT", "--to=dcp"]),
    ("`convert --to torch-dist`", SOURCE, &["convert", "SRC", "OUT", "--to=torch-dist"]),
    ("`reshard`", SOURCE, &["reshard", "SRC", "OUT", "--ranks=3"]),
    ("`average`", SOURCE, &["average", "SRC", "SRC", "--out", "OUT", "--to=dcp"]),
    ("`merge`", SOURCE, &["merge", "SRC", "--out", "OUT", "--to=dcp"]),
    ("`copy` from it", SOURCE, &["copy", "SRC", "FILE"]),
    ("`copy` to it", SOURCE, &["copy", "SRC", "OUT"]),
    ("`rewrite-metadata`", "olmo/any-4rank/ckpt", &["rewrite-metadata", "SRC", "--to=torch"]),
    ("`unshard` of OLMo-core", "olmo/fsdp2-2rank-nested/ckpt", &["unshard", "SRC", "OUT"]),
    (
        "`reshard` of Megatron-Core",
        "megatron/gpt_tp2pp2_swiglu/ckpt",
        &["reshard", "SRC", "OUT", "--tp=1"],
    ),
    (
        "a run of Megatron-LM",
        "megatron/run_legacy_torch_tp2",
        &["convert", "SRC", "FILE.safetensors", "--everything"],
    ),
];

/// Folders that nobody else has, and that go when the tests are over.
struct Folders {
    /// On local disk.
    local: TempDir,
    /// Served by the web server, where there is one.
    served: Option<TempDir>,
}

impl Folders {
    fn new() -> Self {
        // The name is that of a folder in buckets, too.
        let mut named = tempfile::Builder::new();
        named.prefix("cli-").rand_bytes(16);
        let root = env::var_os("DCP_TEST_HTTP_ROOT");
        let served = root.map(|root| named.tempdir_in(root).unwrap());
        Self { local: named.tempdir().unwrap(), served }
    }
}

/// The name of a folder.
fn name_of(folder: &TempDir) -> String {
    folder.path().file_name().unwrap().to_string_lossy().into_owned()
}

impl Place {
    fn all(folders: &Folders) -> Vec<Self> {
        let of = |name, base, options: &[(&str, String)], served| {
            let options = options.iter();
            let options = options.map(|(name, value)| format!("--storage-option={name}={value}"));
            Self { name, base, options: options.collect(), served }
        };
        let variable = |name: &str| env::var(name).ok();
        let text = |name: &str| env::var(name).unwrap_or_default();
        let unique = name_of(&folders.local);
        let at = |scheme: &str, bucket: &str| {
            variable(bucket).map(|bucket| format!("{scheme}://{bucket}/{unique}"))
        };
        let local = folders.local.path().display().to_string();
        let served = folders.served.as_ref();
        let s3 =
            [("aws_endpoint", text("DCP_TEST_S3_ENDPOINT")), ("aws_allow_http", "true".to_owned())];
        let account = text("AZURE_STORAGE_ACCOUNT_NAME");
        let azure = [
            ("azure_endpoint", format!("{}/{account}", text("DCP_TEST_AZURE_ENDPOINT"))),
            ("azure_allow_http", "true".to_owned()),
        ];
        let gcs = [
            ("google_base_url", text("DCP_TEST_GCS_ENDPOINT")),
            ("google_skip_signature", "true".to_owned()),
            ("allow_http", "true".to_owned()),
        ];
        let http = [("allow_http", "true".to_owned())];
        vec![
            of("local disk", Some(local), &[], None),
            of("S3", at("s3", "DCP_TEST_S3_BUCKET"), &s3, None),
            of("Azure", at("az", "DCP_TEST_AZURE_CONTAINER"), &azure, None),
            of("GCS", at("gs", "DCP_TEST_GCS_BUCKET"), &gcs, None),
            of(
                "HTTP",
                variable("DCP_TEST_HTTP_URL")
                    .zip(served)
                    .map(|(url, served)| format!("{url}/{}", name_of(served))),
                &http,
                served.map(|served| served.path().to_owned()),
            ),
        ]
    }

    fn dcp(&self, args: &[String]) -> Result<String, Failed> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dcp"));
        command.args(&self.options).args(args).env_remove("DCP_LOG").env_remove("COLUMNS");
        let output = command.output()?;
        let (stdout, stderr) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if !output.status.success() {
            return Err(format!("dcp {args:?}: {}\n{stdout}{stderr}", output.status).into());
        }
        Ok(stdout.into_owned())
    }

    /// The URL of a copy of a fixture, which is made here.
    fn source(&self, row: usize, fixture: &str) -> Result<String, Failed> {
        let base = self.base.as_deref().unwrap_or_default();
        let from = dcp_testing::fixture(fixture);
        // The folder of a run for `ls` and `prune`: two checkpoints in it.
        let (from, below) = match fixture {
            "" => (dcp_testing::fixture(SOURCE), &["run/step1", "run/step2"][..]),
            _ => (from, &["checkpoint"][..]),
        };
        for below in below {
            let folder = format!("{row}/{below}");
            match &self.served {
                Some(root) => dcp_testing::copy_folder(&from, &root.join(&folder)),
                None => {
                    let url = format!("{base}/{folder}");
                    let copied = vec!["copy".to_owned(), from.display().to_string(), url];
                    drop(self.dcp(&copied)?);
                }
            }
        }
        let opened = if fixture.is_empty() { "run" } else { "checkpoint" };
        Ok(format!("{base}/{row}/{opened}"))
    }

    fn run(&self, row: usize) -> Result<(), Failed> {
        let (_, fixture, args) = ROWS[row];
        let base = self.base.as_deref().unwrap_or_default();
        let scratch = tempfile::tempdir()?;
        let (source, target) = (self.source(row, fixture)?, format!("{base}/{row}/out"));
        let file = scratch.path().join("file").display().to_string();
        let fill =
            |arg: &str| arg.replace("SRC", &source).replace("OUT", &target).replace("FILE", &file);
        let args: Vec<_> = args.iter().map(|arg| fill(arg)).collect();
        let printed = self.dcp(&args)?;
        if args[0] == "ls" {
            assert!(printed.contains("step1"), "{printed}");
        }
        if args[0] == "prune" {
            let listed = self.dcp(&["ls".to_owned(), source.clone(), "--json".to_owned()])?;
            assert!(!listed.contains("step1") && listed.contains("step2"), "{printed}{listed}");
        }
        let made =
            args.iter().skip(2).find(|arg| arg.starts_with(&target) || arg.starts_with(&file));
        match made {
            Some(made) if !made.ends_with(".html") => {
                let all = |url: &str| self.tensors(url, scratch.path());
                // An unsharded OLMo checkpoint is a folder of one file.
                let made = match args[0].as_str() {
                    "unshard" => format!("{made}/model.safetensors"),
                    _ => made.clone(),
                };
                let (wanted, found) = (all(&source)?, all(&made)?);
                assert!(!wanted.is_empty());
                if args[0] == "unshard" {
                    assert!(!found.is_empty());
                } else {
                    assert_eq!(found, wanted);
                }
            }
            _ => {
                // What is only printed is the same as for the checkpoint on local disk.
                let local = dcp_testing::fixture(fixture).display().to_string();
                if args.contains(&"--json".to_owned()) && !fixture.is_empty() {
                    let args: Vec<_> =
                        args.iter().map(|arg| arg.replace(&source, &local)).collect();
                    let wanted = Self { options: Vec::new(), ..self.clone() }.dcp(&args)?;
                    assert_eq!(printed.replace(&source, "SRC"), wanted.replace(&local, "SRC"));
                }
            }
        }
        Ok(())
    }

    fn tensors(&self, url: &str, scratch: &Path) -> Result<Tensors, Failed> {
        let file = scratch.join("compared.safetensors");
        let name = file.display().to_string();
        let args = ["-q", "convert", url, &name, "--everything", "--overwrite"];
        self.dcp(&args.map(str::to_owned))?;
        let mut all = read_tensors(&file);
        all.retain(|name, _| !name.contains("/shard_") && !name.starts_with("common_state"));
        Ok(all)
    }

    /// Whether a row means anything here: nothing is written to a web server, and it has no
    /// listing.
    fn has(&self, row: usize) -> bool {
        let (name, _, args) = ROWS[row];
        let writes = args.iter().any(|arg| arg.starts_with("OUT"))
            || ["`rewrite-metadata`", "`prune`"].contains(&name);
        self.name != "HTTP" || !(writes || name == "`ls`" || name.contains("run of"))
    }
}

type Tensors = BTreeMap<String, (String, Vec<u64>, Vec<u8>)>;

fn read_tensors(path: &Path) -> Tensors {
    let file = fs::read(path).unwrap();
    let len = header_len(&file, file.len() as u64).unwrap();
    let start = usize::try_from(PREFIX_LEN + len).unwrap();
    let (head, data) = file.split_at(start);
    let header = Header::parse(&head[8..], data.len() as u64).unwrap();
    let all = header.tensors().map(|(name, info)| {
        let range = info.byte_range.start as usize..info.byte_range.end as usize;
        (name.to_string(), (info.dtype.to_string(), info.shape.to_vec(), data[range].to_vec()))
    });
    all.collect()
}

fn the_book_has_the_table(places: &[Place]) -> Result<(), Failed> {
    let mut table = format!("| | {} |\n|---|{}\n", PLACES.join(" | "), ":-:|".repeat(PLACES.len()));
    for (row, (name, _, _)) in ROWS.iter().enumerate() {
        table.push_str(&format!("| {name} |"));
        for place in places {
            table.push_str(if place.has(row) { " ✓ |" } else { " – |" });
        }
        table.push('\n');
    }
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/command.md");
    if fs::read_to_string(page)?.contains(&table) {
        return Ok(());
    }
    Err(format!("docs/reference/command.md should have this table:\n{table}").into())
}

fn main() -> ExitCode {
    // Ends the process where the arguments are wrong.
    let arguments = Arguments::from_args();
    let folders = Folders::new();
    let places = Place::all(&folders);
    let mut trials = Vec::new();
    for place in places.iter().cloned().map(Arc::new) {
        for (row, (name, _, _)) in ROWS.iter().enumerate().filter(|(row, _)| place.has(*row)) {
            let name = format!("{}::{}", place.name, name.replace('`', ""));
            let missing = place.base.is_none();
            let place = Arc::clone(&place);
            let trial = Trial::test(name, move || place.run(row)).with_ignored_flag(missing);
            trials.push(trial);
        }
    }
    let for_table = places.clone();
    let table = Trial::test("readme::has_the_table", move || the_book_has_the_table(&for_table));
    trials.push(table);
    libtest_mimic::run(&arguments, trials).exit_code()
}

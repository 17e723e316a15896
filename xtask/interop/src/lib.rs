//! Both directions against a real PyTorch, on data made on the spot.
//!
//! torch saves on 4 processes, Rust loads on 2 and on 3 and compares bit for bit; Rust saves on
//! 3 processes over TCP, torch loads on 1, 2 and 4. Files of `torch.save` go from torch through
//! Rust to torch, in every form; Hugging Face folders go through the command, and transformers
//! opens them. The Rust half is `dcp/examples/interop/`, the Python half is in `xtask/interop/python/`.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "for a command-line tool")]

mod megatron;
mod object;
mod python;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use xtask_host::process::{Scratch, run, run_ranks};
use xtask_host::{Result, port, venv, workspace};

/// Far more than any step takes; a hang is a failure, not a wait.
const LIMIT: Duration = Duration::from_secs(300);

/// What Rust saves on 3 ranks and on one: the name of the checkpoint, how it is saved, and the
/// salt of its contents.
const SAVES: &[(&str, u32, &str, u32)] = &[
    ("three", 3, "plain", 0),
    // Generation names: the second save into the same folder must not touch the first one's files.
    ("overwritten", 3, "plain", 1),
    ("overwritten", 3, "plain", 2),
    ("by_size", 3, "by-size", 3),
    ("one", 1, "plain", 4),
];

/// The same through zstd, which only newer versions read. The second save reads no file of the first.
const COMPRESSED_SAVES: &[(&str, u32, &str, u32)] =
    &[("compressed", 3, "zstd", 5), ("compressed", 3, "zstd", 6), ("compressed_one", 1, "zstd", 7)];

/// Runs everything; the first difference is an error.
pub fn main(args: &[&str]) -> Result {
    let (mut torch, mut keep, mut olmo) = (venv::NEWEST, false, false);
    let (mut megatron, mut object, mut framework) = (None, false, None);
    let mut package = false;
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match *arg {
            "--torch" => torch = args.next().ok_or("--torch needs a version")?,
            "--keep" => keep = true,
            "--olmo" => olmo = true,
            "--object" => object = true,
            "--candle" => framework = Some("candle"),
            "--burn" => framework = Some("burn"),
            "--python" => package = true,
            "--megatron" => megatron = megatron.or(Some(venv::MEGATRON)),
            // Also older ones, which have shapes of their own.
            "--megatron-version" => {
                megatron = Some(*args.next().ok_or("--megatron-version needs a version")?);
            }
            other => return Err(format!("unknown argument {other}").into()),
        }
    }
    let python = match megatron {
        Some(version) => venv::megatron(version)?,
        None if olmo => venv::olmo()?,
        None if object => venv::object()?,
        None => venv::python(torch)?,
    };
    let is_plain = megatron.is_none() && !olmo && !object && framework.is_none() && !package;
    if is_plain && torch == venv::NEWEST {
        venv::with_libraries(&python)?;
    }
    // The package is a workspace of its own, and its tests call no example.
    let rust = match package {
        true => PathBuf::new(),
        false => workspace::build()?.join("examples/interop"),
    };
    let scratch = Scratch::new(&std::env::temp_dir(), "dcp-interop", keep)?;
    let run = Run { python, rust, folder: scratch.path() };

    let start = Instant::now();
    if let Some(version) = megatron {
        run.megatron()?;
        println!(
            "interop with Megatron-Core {version}: both directions agree ({:.0?})",
            start.elapsed()
        );
        return Ok(());
    }
    if package {
        run.python_package(torch == venv::NEWEST)?;
        println!("the Python package with torch {torch}: passed ({:.0?})", start.elapsed());
        return Ok(());
    }
    if olmo {
        run.olmo()?;
        println!("interop with OLMo-core: both directions agree ({:.0?})", start.elapsed());
        return Ok(());
    }
    if object {
        run.object()?;
        println!("interop in S3: both directions agree ({:.0?})", start.elapsed());
        return Ok(());
    }
    if let Some(name) = framework {
        run.framework(name)?;
        println!("interop with {name}: both directions agree ({:.0?})", start.elapsed());
        return Ok(());
    }
    run.torch_to_rust()?;
    run.rust_to_torch("rust", SAVES)?;
    run.torch_save()?;
    if torch == venv::NEWEST {
        run.rust_to_torch("rust_compressed", COMPRESSED_SAVES)?;
        run.compressed_by_command()?;
        run.meshes()?;
        run.state_dicts()?;
        run.parts()?;
        run.subclasses()?;
        run.hugging_face()?;
    }
    println!("interop with torch {torch}: both directions agree ({:.0?})", start.elapsed());
    Ok(())
}

struct Run<'a> {
    python: PathBuf,
    rust: PathBuf,
    folder: &'a Path,
}

impl Run<'_> {
    fn torch_to_rust(&self) -> Result {
        let saved = self.folder.join("torch");
        run(self.script("interop_save.py").arg(&saved))?;
        let mut checkpoints = Vec::new();
        for entry in std::fs::read_dir(&saved)? {
            checkpoints.push(entry?.path());
        }
        checkpoints.sort();
        for ranks in [2, 3] {
            println!("torch → Rust on {ranks} ranks");
            self.rust(ranks, |rust| rust.arg("load").args(&checkpoints))?;
        }
        let carried = self.folder.join("carried");
        println!("torch → Rust → torch: objects that Rust does not understand");
        self.rust(1, |rust| rust.arg("rewrite").arg(saved.join("objects")).arg(&carried))?;
        run(self.script("interop_load.py").arg("objects").arg(&carried))
    }

    /// Files of `torch.save`, by each to the other and back.
    fn torch_save(&self) -> Result {
        let folder = self.folder.join("torch_save");
        std::fs::create_dir(&folder)?;
        println!("torch.save → Rust → torch.load");
        run(self.script("interop_torch_save.py").arg("save").arg(&folder))?;
        let names = ["tensors", "tensors_old", "objects", "objects_old", "objects_new"];
        self.rust(1, |rust| rust.arg("resave").arg(&folder).args(names))?;
        run(self.script("interop_torch_save.py").arg("check").arg(&folder))
    }

    fn rust_to_torch(&self, folder: &str, saves: &[(&str, u32, &str, u32)]) -> Result {
        let state = self.folder.join("state.json");
        run(self.script("interop_state.py").arg(&state))?;
        let saved = self.folder.join(folder);
        let mut names = Vec::new();
        for (name, ranks, how, salt) in saves {
            println!("Rust saves {name} on {ranks} ranks");
            let (path, salt) = (saved.join(name), salt.to_string());
            self.rust(*ranks, |rust| {
                rust.arg("save").arg(&state).arg(&path).args([how, salt.as_str()])
            })?;
            names.retain(|(earlier, _)| earlier != name);
            names.push((*name, salt));
        }
        let names: Vec<_> = names.iter().map(|(name, salt)| format!("{name}={salt}")).collect();
        ["1", "2", "4"].into_iter().try_for_each(|ranks| self.torch_loads(&saved, ranks, &names))
    }

    /// PyTorch loads the checkpoints `NAME=SALT` in a folder.
    fn torch_loads(&self, saved: &Path, ranks: &str, names: &[String]) -> Result {
        println!("Rust → torch on {ranks} ranks");
        let mut load = self.script("interop_load.py");
        run(load.arg("state").arg(self.folder.join("state.json")).arg(saved).arg(ranks).args(names))
    }

    /// What the command compresses, PyTorch loads.
    fn compressed_by_command(&self) -> Result {
        let (from, saved) =
            (self.folder.join("rust/three"), self.folder.join("command_compressed"));
        std::fs::create_dir(&saved)?;
        println!("dcp reshard --compress, dcp convert --compress → torch");
        let mut names = Vec::new();
        for (name, arguments) in [
            ("resharded", &["reshard", "--ranks", "2", "--compress", "zstd"][..]),
            ("converted", &["convert", "--to", "dcp", "--compress", "zstd:19"]),
        ] {
            let to = saved.join(name);
            run(self.dcp().args(arguments).arg("--quiet").arg(&from).arg(to))?;
            names.push(format!("{name}=0"));
        }
        self.torch_loads(&saved, "2", &names)
    }

    /// Folders of transformers and of PyTorch's Hugging Face storage, converted by the command and
    /// opened by the libraries. What families of models say of transformers is so.
    fn hugging_face(&self) -> Result {
        let families = workspace::root().join("dcp-mapping/families");
        run(self.script("interop_families.py").arg(families))?;
        let (theirs, ours) = (self.folder.join("hf"), self.folder.join("hf_converted"));
        println!("transformers and PyTorch → dcp convert → transformers and PyTorch");
        run(self.script("interop_hf.py").arg("save").arg(&theirs))?;
        std::fs::create_dir_all(&ours)?;
        for (model, source) in
            [("llama", "llama"), ("llama", "llama_dcp"), ("gpt2", "gpt2"), ("gpt2", "gpt2_dcp")]
        {
            let (from, to) = (theirs.join(source), ours.join(source));
            let convert = || -> Command {
                let mut dcp = self.dcp();
                dcp.arg("convert").arg(&from).arg(&to).args(["--to", "hf", "--quiet"]);
                dcp.args(["--max-shard-size", "20KB", "--config"]).arg(theirs.join(model));
                dcp
            };
            run(&mut convert())?;
            // A model that replaces another has names that were free.
            run(convert().arg("--overwrite"))?;
        }
        for model in ["llama", "gpt2"] {
            let (from, to) = (theirs.join(model), ours.join(format!("{model}_ranks")));
            self.rust(3, |rust| rust.arg("hugging-face").arg(&from).arg(&to))?;
            std::fs::copy(from.join("config.json"), to.join("config.json"))?;
        }
        for source in ["parts", "parts_mapped"] {
            let (from, to) = (theirs.join(source), ours.join(format!("{source}.safetensors")));
            run(self.dcp().args(["verify", "--quiet"]).arg(&from))?;
            run(self.dcp().args(["convert", "--quiet"]).arg(&from).arg(to))?;
        }
        for source in ["parts", "parts_mapped", "consolidated"] {
            let (from, to) = (theirs.join(source), ours.join(source));
            run(self.dcp().args(["convert", "--to", "hf", "--quiet"]).arg(&from).arg(to))?;
        }
        let (from, to) = (theirs.join("gpt_oss"), ours.join("gpt_oss"));
        let convert = ["convert", "--to", "hf", "--dequantize", "bf16", "--quiet"];
        run(self.dcp().args(convert).arg(from).arg(to))?;
        run(self.script("interop_hf.py").arg("check").arg(&theirs).arg(&ours))
    }

    /// What every rank of every mesh of up to 8 ranks holds, by DTensor and by us.
    fn meshes(&self) -> Result {
        let file = self.folder.join("meshes.txt");
        println!("shards of DTensor on all meshes of 1 to 3 axes and up to 8 ranks");
        run(self.script("interop_mesh.py").arg(&file))?;
        self.rust(1, |rust| rust.arg("mesh").arg(&file))
    }

    /// State dicts of a model and its optimizer, made by both and set by each from the other's.
    fn state_dicts(&self) -> Result {
        let folder = self.folder.join("state_dicts");
        std::fs::create_dir(&folder)?;
        println!("get_state_dict of torch → Rust on 2 ranks → set_state_dict of torch");
        run(self.script("interop_state_dict.py").arg("save").arg(&folder))?;
        self.rust(2, |rust| rust.arg("state-dict").arg(&folder))?;
        run(self.script("interop_state_dict.py").arg("check").arg(&folder))?;
        let folder = self.folder.join("state_ranks");
        std::fs::create_dir(&folder)?;
        println!("what 3 ranks hold of state dicts of torch, gathered, offloaded and broadcast");
        let ranks =
            |job: &str| run(self.script("interop_state_ranks.py").arg(job).arg(&folder).arg("3"));
        ranks("save")?;
        self.rust(3, |rust| rust.arg("state-ranks").arg(&folder))?;
        println!("gathered by 3 ranks of Rust → set_state_dict of torch on 3 ranks");
        ranks("check")
    }

    /// A model and its AdamW that a framework trained go on in PyTorch, and the reverse.
    fn framework(&self, name: &str) -> Result {
        let folder = self.folder.join(name);
        std::fs::create_dir(&folder)?;
        let exchange = |job: &str| {
            let mut rust = workspace::cargo();
            rust.args(["run", "--quiet", "--locked", "--example", "exchange", "--manifest-path"]);
            rust.arg(workspace::root().join(format!("dcp-{name}/Cargo.toml")));
            rust.arg("--target-dir").arg(workspace::target()?);
            run(rust.args(["--", job]).arg(&folder))
        };
        println!("{name} → torch → {name}");
        exchange("save")?;
        run(self.script("interop_framework.py").arg(&folder))?;
        exchange("check")
    }

    /// The model of training states in the layouts that programs have, taken by the command.
    fn parts(&self) -> Result {
        let (states, taken) = (self.folder.join("parts"), self.folder.join("parts_taken"));
        println!("training states → dcp convert → their models");
        run(self.script("interop_parts.py").arg("save").arg(&states))?;
        std::fs::create_dir(&taken)?;
        for entry in std::fs::read_dir(&states)? {
            let from = entry?.path();
            let state = from.file_name().unwrap_or_default().to_string_lossy().into_owned();
            for (option, file) in [
                (&["--model-only"][..], "model-only.safetensors"),
                (&["--no-optimizer"], "no-optimizer.safetensors"),
                (&["--to", "hf"], "hf"),
            ] {
                let to = taken.join(format!("{state}.{file}"));
                run(self.dcp().args(["convert", "--quiet"]).arg(&from).arg(to).args(option))?;
            }
        }
        let (from, to) = (states.join("app"), taken.join("renamed"));
        let rename = ["convert", "--quiet", "--to", "dcp", "--rename", r"s/\b2\./head./"];
        run(self.dcp().args(rename).arg(from).arg(to))?;
        run(self.script("interop_parts.py").arg("check").arg(&states).arg(&taken))
    }

    /// Tensors of torchao's classes, carried by the command and loaded by PyTorch, and made plain
    /// numbers by both.
    fn subclasses(&self) -> Result {
        venv::with_libraries(&self.python)?;
        let (theirs, ours) = (self.folder.join("subclasses"), self.folder.join("subclasses_kept"));
        println!("torchao → dcp convert → torchao");
        run(self.script("interop_subclasses.py").arg("save").arg(&theirs))?;
        std::fs::create_dir(&ours)?;
        for (from, to, format) in [
            ("dcp", "dcp", "dcp"),
            ("file.pt", "file", "dcp"),
            ("file.pt", "copy.pt", "torch-save"),
            ("dcp", "from_dcp.pt", "torch-save"),
        ] {
            let (from, to) = (theirs.join(from), ours.join(to));
            run(self.dcp().args(["convert", "--quiet", "--to", format]).arg(from).arg(to))?;
        }
        for dtype in ["f32", "bf16", "f16"] {
            let (from, to) =
                (theirs.join("quantized.pt"), ours.join(format!("{dtype}.safetensors")));
            let plain = ["convert", "--quiet", "--dequantize", dtype];
            run(self.dcp().args(plain).arg(from).arg(to))?;
        }
        for name in ["w.bias", "w.per_tensor"] {
            let (from, to) = (theirs.join("dcp"), ours.join(format!("{name}.pt")));
            run(self.dcp().args(["--quiet", "get"]).arg(from).args([name, "-o"]).arg(to))?;
        }
        run(self.dcp().args(["verify", "--deep", "--quiet"]).arg(theirs.join("dcp")))?;
        run(self.script("interop_subclasses.py").arg("check").arg(&theirs).arg(&ours))
    }

    /// The command, which is two folders above the examples.
    fn dcp(&self) -> Command {
        let name = format!("dcp{}", std::env::consts::EXE_SUFFIX);
        let folder = self.rust.parent().and_then(Path::parent).unwrap_or(Path::new("."));
        Command::new(folder.join(name))
    }

    /// OLMo-core saves in both layouts; Rust loads each on 2 ranks, saves it in both, and unshards
    /// it; OLMo-core loads what Rust saved, and compares.
    fn olmo(&self) -> Result {
        let saved = self.folder.join("olmo");
        println!("OLMo-core saves");
        run(self.script("interop_olmo.py").arg("save").arg(&saved))?;
        let dcp =
            |args: &[&str], paths: &[&Path]| run(self.dcp().args(args).args(paths).arg("--quiet"));
        for from in ["nested", "flat"] {
            let source = saved.join(from);
            dcp(&["verify", "--deep"], &[&source])?;
            for to in ["nested", "flat"] {
                println!("OLMo-core → Rust → OLMo-core: {from} as {to}");
                let target = saved.join(format!("{from}-as-{to}"));
                self.rust(2, |rust| rust.arg("olmo").arg(&source).arg(&target).arg(to))?;
                run(self.script("interop_olmo.py").args(["load", to]).arg(&target).arg(&saved))?;
            }
            println!("Rust unshards {from} as OLMo-core does");
            let files = saved.join(format!("{from}-unsharded"));
            dcp(&["unshard", "--format", "pt", "--optim"], &[&source, &files])?;
            run(self.script("interop_olmo.py").arg("unsharded").arg(&source).arg(&files))?;
            println!("PyTorch reads {from} once its metadata is rewritten");
            dcp(&["rewrite-metadata", "--to", "torch"], &[&source])?;
            run(self.script("interop_olmo.py").arg("torch").arg(&source).arg(&files))?;
            dcp(&["rewrite-metadata", "--to", "olmo"], &[&source])?;
            run(self.script("interop_olmo.py").args(["load", from]).arg(&source).arg(&saved))?;
        }
        Ok(())
    }

    fn script(&self, name: &str) -> Command {
        Self::script_of(&self.python, name)
    }

    /// A script run by the Python of another environment.
    fn script_of(python: &Path, name: &str) -> Command {
        let mut python = Command::new(python);
        python.arg(workspace::root().join("xtask/interop/python").join(name));
        // Nothing is written into the checkout.
        python.env("PYTHONDONTWRITEBYTECODE", "1");
        python
    }

    /// Runs the Rust half as one group of processes over TCP, as a launcher would start it.
    fn rust(&self, ranks: u32, arguments: impl Fn(&mut Command) -> &mut Command) -> Result {
        // Held until the ranks are done.
        let (_reserved, port) = port::reserved()?;
        let port = port.to_string();
        let commands = (0..ranks).map(|rank| {
            let mut command = Command::new(&self.rust);
            arguments(&mut command);
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
            command
        });
        run_ranks(commands.collect(), LIMIT)
    }
}

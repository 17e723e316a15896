//! Both directions against a real Megatron-Core: its `dist_checkpointing` on CPU processes, and
//! its models against those of transformers.

use std::path::{Path, PathBuf};

use super::Run;
use xtask_host::process::run;
use xtask_host::{Result, venv, workspace};

/// Layouts to load in, as TP by PP, on so many ranks; what is left over is data parallelism.
const LAYOUTS: &[(u32, &[&str])] = &[(4, &["1x4", "4x1", "2x2", "1x1"]), (2, &["1x2", "2x1"])];

/// Versions that open what is written in the form that all versions read.
const OLDER: &[&str] = &["0.12.3", "0.15.3"];

impl Run<'_> {
    /// Megatron-Core saves, Rust opens it, loads it in other layouts and rewrites it; Rust saves;
    /// Megatron-Core loads what Rust wrote, strictly, in every layout.
    pub(super) fn megatron(&self) -> Result {
        let state = self.folder.join("state.json");
        run(self.script("interop_megatron.py").arg("state").arg(&state))?;
        self.newer_arguments()?;
        self.megatron_to_rust(&state)?;
        self.rust_to_megatron(&state)?;
        self.models()
    }

    /// Real runs in the form that all versions read. The arguments of 0.19's hold classes that
    /// earlier versions lack.
    fn newer_arguments(&self) -> Result {
        for name in ["run_torch_dist_v019", "run_torch_dist_dp2"] {
            let saved = workspace::root().join("fixtures/megatron").join(name);
            let written = self.folder.join(format!("compatible_{name}"));
            let mut convert = self.dcp();
            convert.args(["convert", "--quiet", "--to", "torch-dist", "--form", "compatible"]);
            run(convert.arg(saved).arg(&written))?;
            run(self.script("interop_megatron.py").arg("common").arg(&written))?;
            for version in OLDER {
                println!("{name} → Megatron-Core {version}");
                let python = venv::megatron(version)?;
                run(Self::script_of(&python, "interop_megatron.py").arg("common").arg(&written))?;
            }
        }
        Ok(())
    }

    fn megatron_to_rust(&self, state: &Path) -> Result {
        println!("Megatron-Core saves");
        run(self.script("interop_megatron.py").arg("save").arg(self.folder))?;
        // With the layout and the ranks that it was saved from.
        let saved = [
            ("megatron_plain", "2x2x4"),
            ("megatron_parallel", "2x1x4"),
            ("megatron_async", "2x1x4"),
        ];
        for (name, _) in saved {
            let checkpoint = self.folder.join(name);
            run(self.dcp().args(["verify", "--deep", "--quiet"]).arg(&checkpoint))?;
            self.rust(1, |rust| rust.args(["megatron", "open"]).arg(state).arg(&checkpoint))?;
        }
        let checkpoints = saved.map(|(name, layout)| self.saved_as(name, layout));
        for (ranks, layouts) in LAYOUTS {
            for layout in *layouts {
                println!("Megatron-Core → Rust as {layout} on {ranks} ranks");
                self.rust(*ranks, |rust| {
                    rust.args(["megatron", "load"]).arg(state).arg(layout).args(&checkpoints)
                })?;
            }
        }
        Ok(())
    }

    fn rust_to_megatron(&self, state: &Path) -> Result {
        let in_folder = |name: &str| self.folder.join(name);
        for (layout, form, name) in [
            ("2x2", "file", "rust_file"),
            ("2x2", "inside", "rust_inside"),
            // All four ranks hold everything, and share the work.
            ("1x1", "file", "rust_parallel"),
        ] {
            println!("Rust saves {name} as {layout} on 4 ranks");
            self.rust(4, |rust| {
                let rust = rust.args(["megatron", "save"]).arg(state);
                rust.args([layout, form]).arg(in_folder(name))
            })?;
        }
        for (layout, form, name) in [
            (["4", "1"], "compatible", "rust_resharded"),
            (["1", "4"], "newest", "rust_resharded_inside"),
        ] {
            let [tp, pp] = layout;
            let mut reshard = self.dcp();
            reshard.args(["reshard", "--quiet", "--tp", tp, "--pp", pp, "--form", form]);
            run(reshard.arg(in_folder("megatron_plain")).arg(in_folder(name)))?;
        }

        let inside = [in_folder("rust_inside"), in_folder("rust_resharded_inside")];
        println!("the newest form → Rust");
        let newest = ["rust_inside", "rust_resharded_inside"];
        let newest = newest.map(|name| self.saved_as(name, "2x2x4"));
        self.rust(4, |rust| rust.args(["megatron", "load"]).arg(state).arg("4x1").args(&newest))?;
        println!("the newest form → PyTorch");
        run(self.script("interop_megatron.py").arg("inside").args(&inside))?;
        let readable =
            [("rust_file", "2x2x4"), ("rust_parallel", "1x1x4"), ("rust_resharded", "2x2x4")];
        let readable = readable.map(|(name, layout)| self.saved_as(name, layout));
        for (ranks, layouts) in LAYOUTS {
            println!("Rust → Megatron-Core on {ranks} ranks");
            let mut load = self.script("interop_megatron.py");
            load.args(["load", &ranks.to_string(), &layouts.join(",")]);
            run(load.args(&readable))?;
        }
        Ok(())
    }

    /// A checkpoint with the layout that it was saved from, as both halves take it.
    fn saved_as(&self, name: &str, layout: &str) -> String {
        format!("{}={layout}", self.folder.join(name).display())
    }

    /// Models that transformers wrote, as Megatron-Core has them, and the other way.
    fn models(&self) -> Result {
        venv::with_libraries(&venv::python(venv::NEWEST)?)?;
        let (theirs, ours) = (self.folder.join("models"), self.folder.join("models_converted"));
        println!("transformers and Megatron-Core save models");
        run(self.script("interop_megatron_hf.py").arg("save").arg(&theirs))?;
        for entry in std::fs::read_dir(&theirs)? {
            let entry = entry?;
            let (from, made) = (entry.path(), ours.join(entry.file_name()));
            std::fs::create_dir_all(&made)?;
            let convert = |arguments: &[&str], from: PathBuf, to: &str| {
                let mut dcp = self.dcp();
                run(dcp
                    .args(["convert", "--quiet", "--to"])
                    .args(arguments)
                    .arg(from)
                    .arg(made.join(to)))
            };
            // Megatron's checkpoint looks like a Llama's.
            let phi3 = from.file_name().is_some_and(|name| name == "phi3");
            let named: &[_] = if phi3 { &["hf", "--arch", "phi3"] } else { &["hf"] };
            convert(named, from.join("megatron"), "hf")?;
            let arguments = ["torch-dist", "--arch", "auto", "--tp", "2"];
            convert(&arguments, from.join("hf"), "megatron")?;
            convert(&["hf"], made.join("megatron"), "back")?;
            let arguments = [&arguments[..], &["--transformer-impl", "local"]].concat();
            convert(&arguments, from.join("hf"), "local")?;
        }
        let mut check = self.script("interop_megatron_hf.py");
        run(check.arg("check").arg(&theirs).arg(&ours))?;
        println!("transformers → Rust → Megatron-Core's own models");
        run(self.script("interop_megatron_gpt.py").arg("load").arg(&theirs).arg(&ours))?;
        self.own_models()
    }

    /// Models of Megatron-Core with random weights, in transformers.
    fn own_models(&self) -> Result {
        let (theirs, ours) = (self.folder.join("own"), self.folder.join("own_converted"));
        println!("Megatron-Core's own models → Rust → transformers");
        run(self.script("interop_megatron_gpt.py").arg("save").arg(&theirs))?;
        for entry in std::fs::read_dir(&theirs)? {
            let entry = entry?;
            let made = ours.join(entry.file_name());
            std::fs::create_dir_all(&made)?;
            let mut dcp = self.dcp();
            dcp.args(["convert", "--quiet", "--to", "hf"]).arg(entry.path().join("megatron"));
            run(dcp.arg(made.join("hf")))?;
        }
        run(self.script("interop_megatron_gpt.py").arg("check").arg(&theirs).arg(&ours))
    }
}

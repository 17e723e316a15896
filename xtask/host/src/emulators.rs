//! Object stores on this machine, for tests: moto for S3, Azurite for Azure, a static file server,
//! and the double of GCS in `dcp-conformance`.
//!
//! `run` keeps them for one command; `up` keeps them in the background until `down`. A server has
//! its port from the system. A component that cannot be installed is named with the reason, its
//! variables are not set, and its tests report that they were skipped.

mod install;
mod server;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::emulators::server::Server;
use crate::process::{self, Scratch};
use crate::{Result, venv, workspace};

/// The bucket, or container, that each emulator has.
const BUCKET: &str = "dcp-test";

/// The account that every Azurite has; its key is in the documentation of Azurite.
const AZURE_ACCOUNT: &str = "devstoreaccount1";
const AZURE_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

/// Every variable that an emulator sets for tests. Those of one that is not there are removed.
const VARIABLES: &[&str] = &[
    "DCP_TEST_S3_ENDPOINT",
    "DCP_TEST_S3_BUCKET",
    "DCP_TEST_AZURE_ENDPOINT",
    "DCP_TEST_AZURE_CONTAINER",
    "DCP_TEST_GCS_ENDPOINT",
    "DCP_TEST_GCS_BUCKET",
    "DCP_TEST_HTTP_URL",
    "DCP_TEST_HTTP_ROOT",
];

const USAGE: &str = "usage: cargo xtask emulators up | down | env | run -- COMMAND [ARGUMENT]...";
/// The last line that the process in the background prints.
const READY: &str = "ready";
/// What ends the process in the background, sent to its control address.
const STOP: &str = "stop";

type Variables = BTreeMap<String, String>;

/// Runs `up`, `down`, `env` or `run` of `cargo xtask emulators`.
pub fn main(args: &[&str]) -> Result {
    match *args {
        ["up"] => up(),
        ["down"] => down(),
        ["env"] => env(),
        ["run", "--", program, ref args @ ..] => run(program, args),
        // What `up` starts in the background.
        ["serve"] => serve(),
        _ => Err(USAGE.into()),
    }
}

/// Starts the emulators, runs a command with their variables, and ends them.
fn run(program: &str, args: &[&str]) -> Result {
    let emulators = Emulators::start()?;
    let mut command = Command::new(program);
    for variable in VARIABLES {
        command.env_remove(variable);
    }
    workspace::without_own_package(&mut command);
    process::run(command.args(args).envs(&emulators.variables))
}

fn up() -> Result {
    if let Some(variables) = running()? {
        println!("the emulators run already");
        print_exports(&variables);
        return Ok(());
    }
    let log = venv::cache()?.join("emulators.log");
    fs::create_dir_all(venv::cache()?)?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(["emulators", "serve"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(File::create(&log)?)
        // An interrupt at the terminal ends the command that is typed there, and not this.
        .process_group(0)
        .spawn()?;
    let output = child.stdout.take().ok_or("a child without output")?;
    for line in BufReader::new(output).lines() {
        let line = line?;
        if line == READY {
            return Ok(());
        }
        println!("{line}");
    }
    Err(format!("the emulators ended before they served; see {}", log.display()).into())
}

fn down() -> Result {
    let Some(control) = control()? else {
        println!("no emulators run");
        return Ok(());
    };
    let mut reply = String::new();
    let mut stream = TcpStream::connect(control)?;
    writeln!(stream, "{STOP}")?;
    // The process closes the connection by ending.
    BufReader::new(stream).read_line(&mut reply)?;
    println!("the emulators ended");
    Ok(())
}

fn env() -> Result {
    match running()? {
        Some(variables) => print_exports(&variables),
        None => return Err("no emulators run; start them with: cargo xtask emulators up".into()),
    }
    Ok(())
}

/// Serves until `down` connects.
fn serve() -> Result {
    let emulators = Emulators::start()?;
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let state = json!({
        "control": listener.local_addr()?.to_string(),
        "variables": emulators.variables,
    });
    let file = state_file()?;
    fs::write(&file, serde_json::to_vec_pretty(&state)?)?;
    print_exports(&emulators.variables);
    println!("{READY}");
    loop {
        let (stream, _) = listener.accept()?;
        let mut line = String::new();
        // A client that sends something else, or closes the connection, is not `down`.
        if BufReader::new(&stream).read_line(&mut line).is_ok() && line.trim_end() == STOP {
            fs::remove_file(&file)?;
            drop(emulators);
            return Ok(());
        }
    }
}

/// Lines that a shell evaluates.
fn print_exports(variables: &Variables) {
    for (name, value) in variables {
        println!("export {name}='{value}'");
    }
}

fn state_file() -> Result<PathBuf> {
    Ok(venv::cache()?.join("emulators.json"))
}

/// What `serve` wrote, if it still runs.
fn state() -> Result<Option<Value>> {
    let Ok(text) = fs::read(state_file()?) else { return Ok(None) };
    let state: Value = serde_json::from_slice(&text)?;
    let control = workspace::text(&state, "control");
    // A process that was killed leaves the file and no listener.
    Ok(TcpStream::connect(control).is_ok().then_some(state))
}

fn control() -> Result<Option<String>> {
    Ok(state()?.map(|state| workspace::text(&state, "control").to_owned()))
}

fn running() -> Result<Option<Variables>> {
    let Some(mut state) = state()? else { return Ok(None) };
    Ok(Some(serde_json::from_value(state["variables"].take())?))
}

/// The servers that could be installed, and their variables.
#[derive(Debug)]
pub struct Emulators {
    variables: Variables,
    servers: Vec<Server>,
    scratch: Scratch,
}

impl Emulators {
    /// Starts the emulator of S3 alone.
    pub fn s3_only() -> Result<Self> {
        let mut started = Self::none()?;
        started.s3(&install::python()?)?;
        Ok(started)
    }

    /// What tests and clients read.
    pub fn variables(&self) -> &BTreeMap<String, String> {
        &self.variables
    }

    /// One of the variables.
    pub fn variable(&self, name: &str) -> Result<&str> {
        let value = self.variables.get(name).map(String::as_str);
        value.ok_or_else(|| format!("{name} is not set").into())
    }

    fn none() -> Result<Self> {
        let scratch = Scratch::new(&std::env::temp_dir(), "dcp-emulators", false)?;
        Ok(Self { variables: Variables::new(), servers: Vec::new(), scratch })
    }

    /// Starts every emulator that can be installed.
    ///
    /// # Errors
    ///
    /// What is installed and does not start is an error, and not skipped.
    fn start() -> Result<Self> {
        let mut started = Self::none()?;
        let python = installed("S3, Azure and HTTP", install::python());
        if let Some(python) = &python {
            started.s3(python)?;
            started.http(python)?;
        }
        if let (Some(python), Some(azurite)) = (&python, installed("Azure", install::azurite())) {
            started.azure(python, &azurite)?;
        }
        started.gcs()?;
        Ok(started)
    }

    fn s3(&mut self, python: &Path) -> Result {
        let server = Server::start(script(python).args(["s3", BUCKET]), "serves ")?;
        self.set("DCP_TEST_S3_ENDPOINT", &server.endpoint);
        self.set("DCP_TEST_S3_BUCKET", BUCKET);
        // Any pair is right: moto checks no signature.
        self.set("AWS_ACCESS_KEY_ID", "test");
        self.set("AWS_SECRET_ACCESS_KEY", "test");
        self.set("AWS_REGION", "us-east-1");
        self.servers.push(server);
        Ok(())
    }

    fn http(&mut self, python: &Path) -> Result {
        let root = self.scratch.path().join("http");
        fs::create_dir(&root)?;
        let server = Server::start(script(python).arg("http").arg(&root), "serves ")?;
        self.set("DCP_TEST_HTTP_URL", &server.endpoint);
        self.set("DCP_TEST_HTTP_ROOT", root.to_str().ok_or("a folder without a name")?);
        self.servers.push(server);
        Ok(())
    }

    fn azure(&mut self, python: &Path, azurite: &Path) -> Result {
        let quit = workspace::root().join("xtask/host/src/emulators/quit_with_parent.js");
        let mut node = Command::new("node");
        node.arg("--require").arg(quit).arg(azurite);
        node.args(["--blobPort", "0", "--inMemoryPersistence", "--skipApiVersionCheck"]);
        node.args(["--silent", "--disableTelemetry"]);
        let server = Server::start(&mut node, "successfully listens on ")?;
        let endpoint = server.endpoint.clone();
        process::run(script(python).args(["container", &endpoint, BUCKET]))?;
        self.set("DCP_TEST_AZURE_ENDPOINT", &endpoint);
        self.set("DCP_TEST_AZURE_CONTAINER", BUCKET);
        self.set("AZURE_STORAGE_ACCOUNT_NAME", AZURE_ACCOUNT);
        self.set("AZURE_STORAGE_ACCOUNT_KEY", AZURE_KEY);
        // `object_store` reads the endpoint of an emulator from here and from nowhere else.
        self.set("AZURITE_BLOB_STORAGE_URL", &endpoint);
        self.servers.push(server);
        Ok(())
    }

    fn gcs(&mut self) -> Result {
        // Of the whole workspace, whose tests have its features.
        let selection = ["build", "--quiet", "--workspace", "--example", "gcs_double"];
        process::run(workspace::cargo().args(selection))?;
        let double = workspace::target()?.join("debug/examples/gcs_double");
        let server = Server::start(Command::new(double).arg(BUCKET), "serves ")?;
        self.set("DCP_TEST_GCS_ENDPOINT", &server.endpoint);
        self.set("DCP_TEST_GCS_BUCKET", BUCKET);
        let key = json!({
            "gcs_base_url": server.endpoint,
            "disable_oauth": true,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        });
        self.set("GOOGLE_SERVICE_ACCOUNT_KEY", &key.to_string());
        self.servers.push(server);
        Ok(())
    }

    fn set(&mut self, name: &str, value: &str) {
        self.variables.insert(name.to_owned(), value.to_owned());
    }
}

/// What was installed; otherwise says which component is not here, and why.
fn installed<T>(component: &str, outcome: Result<T>) -> Option<T> {
    outcome.map_err(|error| println!("SKIPPED: {component}: {error}")).ok()
}

fn script(python: &Path) -> Command {
    let mut command = Command::new(python);
    command.arg(workspace::root().join("xtask/host/src/emulators/emulators.py"));
    command
}

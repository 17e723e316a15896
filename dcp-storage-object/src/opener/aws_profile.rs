//! The profile of AWS's programs: keys, region and endpoint in `~/.aws/credentials` and
//! `~/.aws/config`, which `object_store` does not read.

use std::fmt;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use dcp_core::error::StorageOp;
use dcp_core::text::Quoted;
use dcp_core::{StorageError, StorageErrorKind as Kind};

use super::ini::{Ini, Section};
use super::invalid;

/// A longer file is none of AWS's programs, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The setting that names the profile.
pub(super) const OPTION: &str = "aws_profile";

/// Properties of which credentials come that are not in the file.
const ELSEWHERE: &[&str] = &["role_arn", "sso_session", "sso_start_url", "sso_account_id"];

/// Returns the bytes of a file; `None` if it does not exist.
type ReadFile<'a> = dyn Fn(&Path) -> Result<Option<Vec<u8>>, std::io::Error> + 'a;

/// The environment of a process: variables and files.
pub(super) struct Surroundings<'a> {
    pub(super) variable: &'a dyn Fn(&str) -> Option<String>,
    pub(super) file: &'a ReadFile<'a>,
}

impl Surroundings<'static> {
    /// The environment of this process.
    pub(super) fn of_process() -> Self {
        Self { variable: &|name| std::env::var(name).ok(), file: &read }
    }
}

/// Reads a regular file, or one to which a link leads. A pipe would be waited for.
fn read(path: &Path) -> Result<Option<Vec<u8>>, std::io::Error> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => {}
        Ok(_) => {
            let problem = "it is a folder, a device, a pipe or a socket, and not a file";
            return Err(std::io::Error::new(ErrorKind::InvalidData, problem));
        }
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    }
    let file = std::fs::File::open(path)?;
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// A profile, from both files.
pub(super) struct Profile {
    name: String,
    credentials: Option<Section>,
    config: Option<Section>,
    /// The section of `config` that the profile names for the addresses of services.
    services: Option<Section>,
}

/// Keys of an account.
#[derive(PartialEq, Eq)]
pub(super) struct StaticKeys {
    pub(super) id: String,
    pub(super) secret: String,
    pub(super) token: Option<String>,
}

impl fmt::Debug for StaticKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StaticKeys").finish_non_exhaustive()
    }
}

impl Profile {
    /// The profile that `option` names, or `AWS_PROFILE`, or else `default`. `None` if there is no
    /// profile and none is named.
    pub(super) fn find(
        option: Option<&str>,
        around: &Surroundings<'_>,
    ) -> Result<Option<Self>, StorageError> {
        let variable = |name: &str| (around.variable)(name).filter(|value| !value.is_empty());
        let named = option.map(str::to_owned);
        let named = named.or_else(|| variable("AWS_PROFILE"));
        let named = named.or_else(|| variable("AWS_DEFAULT_PROFILE"));
        let home = variable("HOME").or_else(|| variable("USERPROFILE"));
        let path = |variable_: &str, name: &str| {
            let in_home = || Some(PathBuf::from(home.as_ref()?).join(".aws").join(name));
            variable(variable_).map(PathBuf::from).or_else(in_home)
        };
        let paths =
            [path("AWS_SHARED_CREDENTIALS_FILE", "credentials"), path("AWS_CONFIG_FILE", "config")];
        let [credentials, config] = &paths;
        let open = |path: &Option<PathBuf>| match path {
            Some(path) => ini(path, around),
            None => Ok(Ini::default()),
        };
        let (credentials, config) = (open(credentials)?, open(config)?);
        let name = named.clone().unwrap_or_else(|| "default".to_owned());
        let of_config = config.section(&format!("profile {name}"));
        let of_config = of_config.or_else(|| config.section(&name).filter(|_| name == "default"));
        let services = of_config.and_then(|section| section.get("services"));
        let services = services.and_then(|name| config.section(&format!("services {name}")));
        let found = Self {
            credentials: credentials.section(&name).cloned(),
            config: of_config.cloned(),
            services: services.cloned(),
            name,
        };
        let is_there = found.credentials.is_some() || found.config.is_some();
        if !is_there && named.is_some() {
            let paths: Vec<_> = paths.iter().flatten().map(|path| path.display()).collect();
            let paths = paths.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
            let message = format!(
                "there is no AWS profile {} in {}",
                Quoted(&found.name),
                if paths.is_empty() { "any file, as there is no home folder" } else { &paths }
            );
            return Err(
                StorageError::new(Kind::Credentials, StorageOp::Open, None).with_message(message)
            );
        }
        Ok(is_there.then_some(found))
    }

    /// A property of the profile; `credentials` comes before `config`.
    fn get(&self, name: &str) -> Option<&str> {
        let sections = [&self.credentials, &self.config];
        let values = sections.into_iter().flatten().filter_map(|section| section.get(name));
        values.map(String::as_str).find(|value| !value.is_empty())
    }

    /// The region, if the profile has one.
    pub(super) fn region(&self) -> Option<&str> {
        self.get("region")
    }

    /// The address of S3, if the profile has one.
    pub(super) fn endpoint(&self) -> Option<&str> {
        let is_ignored = self.get("ignore_configured_endpoint_urls");
        if is_ignored.is_some_and(|ignored| ignored.eq_ignore_ascii_case("true")) {
            return None;
        }
        let of_services = self.services.as_ref().and_then(|section| section.get("s3.endpoint_url"));
        let of_services = of_services.map(String::as_str).filter(|value| !value.is_empty());
        of_services.or_else(|| self.get("s3.endpoint_url")).or_else(|| self.get("endpoint_url"))
    }

    /// The keys; `None` if the profile has no credentials.
    ///
    /// # Errors
    ///
    /// [`Credentials`](Kind::Credentials) when they are somewhere else, or one of two is missing.
    pub(super) fn keys(&self) -> Result<Option<StaticKeys>, StorageError> {
        let elsewhere = ELSEWHERE.iter().find(|name| self.get(name).is_some());
        if let Some(property) = elsewhere {
            return Err(self.elsewhere(property));
        }
        let token = || self.get("aws_session_token").or_else(|| self.get("aws_security_token"));
        match (self.get("aws_access_key_id"), self.get("aws_secret_access_key")) {
            (Some(id), Some(secret)) => Ok(Some(StaticKeys {
                id: id.to_owned(),
                secret: secret.to_owned(),
                token: token().map(str::to_owned),
            })),
            (None, None) if self.get("credential_process").is_some() => {
                Err(self.elsewhere("credential_process"))
            }
            (None, None) => Ok(None),
            (id, _) => {
                let missing =
                    if id.is_some() { "aws_secret_access_key" } else { "aws_access_key_id" };
                Err(self.error(format!("has no {missing}")))
            }
        }
    }

    fn elsewhere(&self, property: &str) -> StorageError {
        let name = Quoted(&self.name);
        self.error(format!(
            "has its credentials from its {property}, which only AWS's programs use: run `aws \
             configure export-credentials --profile {name} --format env` and set the variables that \
             it prints"
        ))
    }

    fn error(&self, problem: String) -> StorageError {
        let message = format!("the AWS profile {} {problem}", Quoted(&self.name));
        StorageError::new(Kind::Credentials, StorageOp::Open, None).with_message(message)
    }
}

/// Values are secrets.
impl fmt::Debug for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Profile").field("name", &self.name).finish_non_exhaustive()
    }
}

fn ini(path: &Path, around: &Surroundings<'_>) -> Result<Ini, StorageError> {
    let shown = path.display().to_string();
    let bytes = (around.file)(path).map_err(|error| {
        let kind = match error.kind() {
            ErrorKind::PermissionDenied => Kind::Denied,
            _ => Kind::Invalid,
        };
        StorageError::new(kind, StorageOp::Open, None)
            .with_message(format!("{} cannot be read", Quoted(&shown)))
            .with_source(error)
    })?;
    let Some(bytes) = bytes else { return Ok(Ini::default()) };
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(invalid(format!("{} has more than {FILE_BYTES_MAX} bytes", Quoted(&shown))));
    }
    Ini::parse(&bytes).map_err(|error| match error.line {
        0 => invalid(format!("{}: {}", Quoted(&shown), error.problem)),
        line => invalid(format!("{}, line {line}: {}", Quoted(&shown), error.problem)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CREDENTIALS: &str = "[default]\naws_access_key_id=ID\naws_secret_access_key=5ec7e7\n\
        [eu]\naws_access_key_id=EU\naws_secret_access_key=5ec7e7\naws_session_token=5ec7e7t\n\
        [half]\naws_access_key_id=HALF\n\
        [role]\naws_access_key_id=ID\naws_secret_access_key=5ec7e7\n";
    const CONFIG: &str = "[default]\nregion=us-west-2\nendpoint_url=http://default\n\
        [profile eu]\nregion=eu-west-1\nservices=local\nendpoint_url=http://general\n\
        [services local]\ns3=\n  endpoint_url=http://of-s3\n\
        [profile sso]\nsso_session=5ec7e7\n\
        [profile process]\ncredential_process=/bin/5ec7e7\n\
        [profile role]\nrole_arn=arn:5ec7e7\n\
        [profile region]\nregion=x\ns3=\n endpoint_url=http://nested\n";

    fn find(
        option: Option<&str>,
        variables: &[(&str, &str)],
    ) -> Result<Option<Profile>, StorageError> {
        let variable = |name: &str| {
            let all = variables.iter().chain(&[("HOME", "/home/me")]);
            all.into_iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        let file = |path: &Path| {
            Ok(match path.to_str().unwrap() {
                "/home/me/.aws/credentials" => Some(CREDENTIALS.into()),
                "/home/me/.aws/config" => Some(CONFIG.into()),
                "/other" => Some(b"[default]\naws_access_key_id=O\naws_secret_access_key=o".into()),
                "/bad" => Some(b"[default]\naws_secret_access_key 5ec7e7".into()),
                "/long" => Some(vec![b'#'; FILE_BYTES_MAX as usize + 1]),
                _ => None,
            })
        };
        Profile::find(option, &Surroundings { variable: &variable, file: &file })
    }

    fn id(profile: Option<Profile>) -> Option<String> {
        profile?.keys().unwrap().map(|keys| keys.id)
    }

    #[test]
    fn a_profile_is_that_of_the_option_or_of_the_variable_or_the_default() {
        let variable = [("AWS_PROFILE", "eu")];
        assert_eq!(id(find(None, &[]).unwrap()).as_deref(), Some("ID"));
        assert_eq!(id(find(None, &variable).unwrap()).as_deref(), Some("EU"));
        assert_eq!(id(find(Some("default"), &variable).unwrap()).as_deref(), Some("ID"));
        let other = [("AWS_SHARED_CREDENTIALS_FILE", "/other"), ("AWS_CONFIG_FILE", "/none")];
        let other = find(None, &other).unwrap().unwrap();
        assert_eq!((other.region(), other.endpoint()), (None, None));
        assert_eq!(id(Some(other)).as_deref(), Some("O"));
        let none = [("AWS_SHARED_CREDENTIALS_FILE", "/x"), ("AWS_CONFIG_FILE", "/x")];
        assert!(find(None, &none).unwrap().is_none());
    }

    #[test]
    fn a_profile_has_keys_region_and_endpoint() {
        let default = find(None, &[]).unwrap().unwrap();
        assert_eq!(
            (default.region(), default.endpoint()),
            (Some("us-west-2"), Some("http://default"))
        );
        let eu = find(Some("eu"), &[]).unwrap().unwrap();
        assert_eq!((eu.region(), eu.endpoint()), (Some("eu-west-1"), Some("http://of-s3")));
        let keys = eu.keys().unwrap().unwrap();
        assert_eq!((&*keys.secret, keys.token.as_deref()), ("5ec7e7", Some("5ec7e7t")));
        let region = find(Some("region"), &[]).unwrap().unwrap();
        assert_eq!((region.keys().unwrap(), region.endpoint()), (None, Some("http://nested")));
        let shown = format!("{eu:?} {keys:?}");
        assert!(!shown.contains("5ec7e7"), "{shown}");
    }

    #[test]
    fn credentials_from_elsewhere_are_refused_with_what_to_do() {
        for (name, said) in [
            ("sso", "sso_session"),
            ("role", "role_arn"),
            ("process", "credential_process"),
            ("half", "has no aws_secret_access_key"),
        ] {
            let error = find(Some(name), &[]).unwrap().unwrap().keys().unwrap_err();
            let text = format!("{error:?} {error}");
            assert_eq!(error.kind(), Kind::Credentials);
            assert!(text.contains(said) && text.contains(name), "{text}");
            assert!(!text.contains("5ec7e7"), "{text}");
            let is_exported = text.contains("export-credentials --profile");
            assert_eq!(is_exported, name != "half", "{text}");
        }
        let error = find(Some("absent"), &[]).unwrap_err();
        assert_eq!(error.kind(), Kind::Credentials);
        let text = error.to_string();
        assert!(text.contains("absent") && text.contains(".aws/credentials and "), "{text}");
    }

    #[test]
    fn a_bad_file_is_named_without_its_text() {
        for (path, said) in [("/bad", "line 2"), ("/long", "more than")] {
            let error = find(None, &[("AWS_SHARED_CREDENTIALS_FILE", path)]).unwrap_err();
            let text = format!("{error:?} {error}");
            assert!(text.contains(path) && text.contains(said), "{text}");
            assert!(!text.contains("5ec7e7"), "{text}");
        }
    }
}

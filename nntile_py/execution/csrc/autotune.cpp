#include "autotune.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>

namespace nntile {
namespace {

struct State {
  std::mutex mutex;
  std::string folder;
  std::map<std::string, std::map<std::string, int>> files;  // for each file: choice by key
};

State& state() {
  static auto& made = *new State;  // never destroyed, as workers may outlive main
  return made;
}

// A locked file of lines "KEY: CHOICE". A file that cannot be opened counts as empty, and writes to it are lost.
class Locked {
 public:
  explicit Locked(const std::filesystem::path& path) {
    std::error_code ignored;
    std::filesystem::create_directories(path.parent_path(), ignored);
    file_ = open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file_ < 0) file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (struct stat found; file_ >= 0 && (fstat(file_, &found) || !S_ISREG(found.st_mode))) {  // a folder, a pipe
      close(file_);
      file_ = -1;
    }
    // Some file systems lack locks. Two processes may then measure the same choice twice, without other harm.
    for (int turn = 0; turn < kTurns && file_ >= 0 && flock(file_, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK; ++turn)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }

  ~Locked() {
    if (file_ < 0) return;
    flock(file_, LOCK_UN);  // a forked process may have the file open, too
    close(file_);
  }

  Locked(const Locked&) = delete;

  void read(std::map<std::string, int>& choices) const {
    std::string text(file_ < 0 ? 0 : static_cast<size_t>(size()), ' ');
    const auto bytes = text.empty() ? 0 : pread(file_, text.data(), text.size(), 0);
    std::istringstream lines(text.substr(0, static_cast<size_t>(std::max<ssize_t>(bytes, 0))));
    for (std::string line; std::getline(lines, line);) {
      const auto colon = line.rfind(": ");
      int choice = -1;
      if (colon != line.npos && std::istringstream(line.substr(colon + 2)) >> choice && choice >= 0)
        choices.emplace(line.substr(0, colon), choice);
    }
  }

  void add(const std::string& key, int choice) const {
    if (file_ < 0) return;
    const auto before = size();
    char last = '\n';
    if (before) (void)!pread(file_, &last, 1, before - 1);
    const auto line = (last == '\n' ? "" : "\n") + key + ": " + std::to_string(choice) + "\n";
    // If the disk is full, remove the part of the line: it could be read as another choice. Only this process then
    // knows the choice.
    const auto written = write(file_, line.data(), line.size());
    if (written > 0 && static_cast<size_t>(written) < line.size()) (void)!ftruncate(file_, before);
  }

 private:
  off_t size() const { return std::max<off_t>(lseek(file_, 0, SEEK_END), 0); }

  static constexpr int kTurns = 1000;
  int file_;
};

thread_local bool chooses = false;  // this thread holds the lock

// Returns an earlier choice of this or another process.
std::optional<int> kept(const std::string& file, const std::string& key) {
  if (chooses) return {};
  const std::lock_guard lock(state().mutex);
  auto& choices = state().files[file];
  if (!choices.contains(key) && !state().folder.empty()) Locked(std::filesystem::path(state().folder) / file).read(choices);
  const auto found = choices.find(key);
  return found == choices.end() ? std::nullopt : std::make_optional(found->second);
}

}  // namespace

void keep_choices(const std::string& folder) {
  const std::lock_guard lock(state().mutex);
  state().folder = folder;
}

size_t way_to_take(const std::function<std::string()>& file, const std::function<std::string()>& key, size_t count,
                   size_t alone) {
  if (!choices_in_graph || count == 1) return alone;
  const auto [found, made] = choices_in_graph->try_emplace("in a graph, " + key());
  auto& choice = found->second;
  if (made) {
    choice = {alone, count, file()};
    if (const auto before = kept(choice.file, found->first))
      choice.way = std::min(static_cast<size_t>(*before), count - 1), choice.open = false;
  }
  choice.used = true;
  return choice.way;
}

int chosen(const std::string& file, const std::string& key, const std::function<int()>& measure) {
  if (chooses) return measure();  // a nested choice: this thread holds the lock
  const std::lock_guard lock(state().mutex);
  struct Inside {
    Inside() { chooses = true; }
    ~Inside() { chooses = false; }
  } inside;
  auto& choices = state().files[file];
  if (const auto found = choices.find(key); found != choices.end()) return found->second;
  if (state().folder.empty()) return choices[key] = measure();
  const Locked shared(std::filesystem::path(state().folder) / file);
  shared.read(choices);
  if (const auto found = choices.find(key); found != choices.end()) return found->second;
  const int choice = measure();
  shared.add(key, choice);
  return choices[key] = choice;
}

}  // namespace nntile

// Search in pages that are opened from disk. Browsers refuse a Worker from file://, so its script runs in a hidden frame.
// mkdocs-material's offline plugin looks for a polyfill of this name, and loads one from the network where there is none.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html>"
      this.loaded = new Promise((resolve) => {
        frame.onload = () => {
          const inner = frame.contentWindow
          inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
          const script = inner.document.createElement("script")
          script.src = url
          script.onload = () => resolve(inner)
          inner.document.body.append(script)
        }
      })
      document.body.append(frame)
    }
    postMessage(data) {
      this.loaded.then((inner) => inner.dispatchEvent(new inner.MessageEvent("message", { data })))
    }
    terminate() {}
  }
}

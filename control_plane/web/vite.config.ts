import { defineConfig } from "vite"

// No inline script or style: the content security policy of the control plane allows none.
export default defineConfig({
  esbuild: { jsx: "automatic", jsxImportSource: "preact", legalComments: "none" },
  build: {
    target: "es2022", assetsInlineLimit: 0, modulePreload: { polyfill: false }, sourcemap: false,
  },
})
